"""What is wrong with a run, all of it at once, each with key, value and remedy."""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from rl_megatron.config.base import PROBLEMS, Strict, resolved
from rl_megatron.config.schema import alternatives, fields, locate, sections

_NO_VALUE = object()

_WRONG_TYPE = {
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "string_type": "must be text (quotes make it so)",
    "tuple_type": "must be a list, e.g. [a, b]",
}
_OUT_OF_BOUNDS = {
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "string_too_short": "must not be empty",
    "too_short": "must list at least {min_length}",
}

_FOLLOWS_FROM_OTHERS = {"default_factory_not_called"}


@dataclass(frozen=True)
class Mistake:
    """One thing that is wrong.

    Attributes:
        key: Dotted key.
        value: The value there, or a mark that there is none.
        text: What is wrong, and the remedy.
        others: Dotted keys, or sections, that take part in it.
    """

    key: str
    value: object
    text: str
    others: tuple[str, ...] = ()

    def line(self, origin: str | None) -> str:
        """The message, one line; `origin` is where the key was set."""
        value = "" if self.value is _NO_VALUE else f" = {show(self.value)}"
        place = f" ({origin})" if origin else ""
        return f"{self.key}{value}{place}: {self.text}"

    def concerns(self, keys: Iterable[str]) -> bool:
        """Whether any of `keys`, or a section above or below one, takes part in this."""
        return any(_overlap(mine, key) for mine in (self.key, *self.others) for key in keys)


def find_mistakes(run: type[Strict], data: dict[str, Any]) -> list[Mistake]:
    """Everything that keeps `data` from being a run of this class.

    Pydantic does not ask whether settings fit each other before every single one is right. So
    wrong settings are taken out and the rest is asked again, until nothing new is found; what
    then only follows from a setting having been taken out is not reported.
    """
    data = copy.deepcopy(data)
    found: list[Mistake] = []
    while True:
        try:
            run.model_validate(data)
        except ValidationError as error:
            broken = [mistake.key for mistake in found]
            details = error.errors(include_url=False)
            mistakes = [m for detail in details for m in _from_pydantic(run, detail)]
            new = [mistake for mistake in mistakes if not mistake.concerns(broken)]
            if not new:
                return found
            found += new
            for mistake in new:
                _take_out(data, mistake.key)
        else:
            return found


def show(value: object) -> str:
    """A value as it would be written in YAML; long ones are cut."""
    if isinstance(value, str):
        return repr(value)
    try:
        text = json.dumps(resolved(value))
    except (TypeError, ValueError):
        text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _from_pydantic(run: type[Strict], error: ErrorDetails) -> Iterator[Mistake]:
    key, section, field = locate(run, error["loc"])
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    if kind in _FOLLOWS_FROM_OTHERS or (kind == "too_short" and value):
        return  # Pydantic does not count items that are wrong themselves.
    if kind == PROBLEMS:
        prefix = f"{key}." if key else ""
        for problem in context[PROBLEMS]:
            others = tuple(prefix + other for other in problem.others)
            yield Mistake(prefix + problem.key, problem.value, problem.text, others)
    elif kind == "missing":
        yield Mistake(key, _NO_VALUE, f"is required; {_what_to_set(field)}")
    elif kind == "extra_forbidden":
        yield Mistake(key, value, f"unknown key; {_suggest_key(run, section, key)}")
    elif kind in ("union_tag_invalid", "union_tag_not_found"):
        yield _wrong_variant(key, value, context)
    else:
        yield Mistake(key, value, _wrong_value(error, field))


def _wrong_value(error: ErrorDetails, field: FieldInfo | None) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind == "literal_error":
        assert field is not None, "only fields have values"
        known = [str(k) for a in alternatives(field.annotation) for k in get_args(a)]
        return f"must be one of {', '.join(known)}{_did_you_mean(error['input'], known)}"
    if kind == "model_type" and field is not None:
        known = [name for s in sections(field.annotation) for name in s.model_fields]
        return f"must be a section, with settings such as {', '.join(known[:4])}"
    if kind == "string_pattern_mismatch" and field is not None:
        return f"has the wrong form: {_one_line(field.description)}"
    text = _WRONG_TYPE.get(kind) or _OUT_OF_BOUNDS.get(kind, error["msg"]).format(**context)
    return text + _or_default(field)


def _or_default(field: FieldInfo | None) -> str:
    if field is None or field.is_required() or field.default_factory or sections(field.annotation):
        return ""
    return f"; without this key it is {show(field.default)}"


def _what_to_set(field: FieldInfo | None) -> str:
    assert field is not None, "only a field can be missing"
    description = _one_line(field.description)
    return f"set it: {description}" if description else "add this section"


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def _wrong_variant(key: str, value: object, context: dict[str, Any]) -> Mistake:
    tag = str(context["discriminator"]).strip("'")
    if "expected_tags" not in context:
        return Mistake(key, value, f"has no `{tag}`, which says what it is; add one")
    known = [name.strip("' ") for name in context["expected_tags"].split(",")]
    hint = _did_you_mean(context["tag"], known)
    return Mistake(f"{key}.{tag}", context["tag"], f"must be one of {', '.join(known)}{hint}")


def _did_you_mean(value: object, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(value), list(known), n=1)
    return f"; did you mean '{close[0]}'?" if close else ""


def _suggest_key(run: type[Strict], section: type[Strict], key: str) -> str:
    name = key.rpartition(".")[2]
    siblings = list(section.model_fields)
    close = difflib.get_close_matches(name, siblings, n=1)
    elsewhere = [known for known, _ in fields(run) if known.rpartition(".")[2] == name]
    if not elsewhere and close:
        return f"did you mean '{close[0]}'?"
    if elsewhere:
        return f"did you mean '{elsewhere[0]}'?"
    return f"known here: {', '.join(siblings)}"


def _overlap(a: str, b: str) -> bool:
    return a == b or a.startswith(f"{b}.") or b.startswith(f"{a}.")


def _take_out(data: Any, key: str) -> None:
    """Remove a setting. Of a list, all: removing one item would move the others."""
    *path, name = key.split(".")
    for part in path:
        if isinstance(data.get(part), list):
            name = part
            break
        data = data.get(part)
        if not isinstance(data, dict):
            return
    data.pop(name, None)
