"""What every section of a run is: strict, frozen, and able to say what does not fit.

A section says two things beside its fields. `problems` lists settings that do not fit each other.
`idle` lists settings that have no effect as the run stands: setting one is refused, because its
author believes that it does something, and it is left out when the resolved run is printed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

PROBLEMS = "problems"
"""Type of the pydantic error that carries a list of `Problem`, and the key it is found under."""


@dataclass(frozen=True)
class Problem:
    """A setting whose value cannot stand.

    Attributes:
        key: Dotted key, relative to the section that reports it.
        value: The value in question.
        text: What is wrong, and the remedy.
        others: Other settings that take part: dotted keys, relative to the same section.
    """

    key: str
    value: object
    text: str
    others: tuple[str, ...] = ()


@dataclass(frozen=True)
class Idle:
    """Why a setting has no effect.

    Attributes:
        reason: The reason and the remedy.
        switches: The settings that decide it: dotted keys, relative to the section.
    """

    reason: str
    switches: tuple[str, ...]


class Strict(BaseModel):
    """A section of a run. Unknown keys are refused, nothing is converted, nothing changes."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    def problems(self) -> Iterable[Problem]:
        """Settings of this section, or below it, that do not fit each other."""
        return ()

    def idle(self) -> Mapping[str, Idle]:
        """Settings that have no effect as things stand: dotted keys, relative to this section."""
        return {}

    @model_validator(mode="after")
    def _refuse_what_does_not_fit(self) -> Strict:
        problems = [*self.problems(), *self._idle_but_set()]
        if problems:
            text = "; ".join(f"{p.key} = {p.value!r}: {p.text}" for p in problems)
            raise PydanticCustomError(PROBLEMS, "{text}", {"text": text, PROBLEMS: problems})
        return self

    def _idle_but_set(self) -> Iterator[Problem]:
        for key, idle in self.idle().items():
            *path, name = key.split(".")
            section: Any = self
            for part in path:
                section = getattr(section, part)
            if name in section.model_fields_set:
                value = resolved(getattr(section, name))
                yield Problem(key, value, f"has no effect: {idle.reason}", idle.switches)


def resolved(value: Any) -> Any:
    """`value` as plain YAML data, defaults included and settings without effect left out."""
    if isinstance(value, tuple):
        return [resolved(item) for item in value]
    if isinstance(value, Mapping):
        return {name: resolved(item) for name, item in value.items()}
    return _resolved_section(value, frozenset()) if isinstance(value, Strict) else value


def _resolved_section(section: Strict, idle: frozenset[str]) -> dict[str, Any]:
    idle = idle | section.idle().keys()
    plain = {}
    for name in type(section).model_fields:
        if name in idle:
            continue
        value = getattr(section, name)
        if isinstance(value, Strict):
            below = {key.removeprefix(f"{name}.") for key in idle if key.startswith(f"{name}.")}
            plain[name] = _resolved_section(value, frozenset(below))
        else:
            plain[name] = resolved(value)
    return plain
