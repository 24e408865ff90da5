"""What a run class says of its own keys: sections, fields, types. For messages and for --help."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import Discriminator, Field, Tag
from pydantic.fields import FieldInfo

from rl_megatron.config.base import Strict

_TYPE_NAMES = {int: "int", float: "number", bool: "true | false", str: "text"}
# Which of its two forms a setting has, in pydantic's locations.
_ONE, _NAMED = "one", "named"
# How pydantic says that it is the name itself that is wrong.
_NAME_ITSELF = "[key]"

_SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def _form(value: Any) -> str:
    """Several sections are all there is by name; a section by itself has plain settings, too."""
    items = value.values() if isinstance(value, Mapping) else ()
    several = bool(items) and all(isinstance(item, Mapping | Strict) for item in items)
    return _NAMED if several else _ONE


Section = TypeVar("Section", bound=Strict)
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]

OneOrNamed = Annotated[
    Annotated[Section, Tag(_ONE)] | Annotated[Mapping[Name, Section], Tag(_NAMED)],
    Discriminator(_form),
]
"""A section, or several by name."""


def bare(annotation: Any) -> Any:
    """The annotation without its metadata."""
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """The members of a union and of unions in it, None left out; of anything else, itself."""
    annotation = bare(annotation)
    if _is_union(annotation):
        members = (a for a in get_args(annotation) if a is not types.NoneType)
        return tuple(member for a in members for member in alternatives(a))
    return (annotation,)


def sections(annotation: Any) -> list[type[Strict]]:
    """The section that a field holds, or the variants of it; empty for a plain value."""
    return [a for a in alternatives(annotation) if isinstance(a, type) and issubclass(a, Strict)]


def by_name(annotation: Any) -> Any:
    """The mapping among the members of an annotation, or None."""
    return next((a for a in alternatives(annotation) if get_origin(a) is Mapping), None)


def item(annotation: Any) -> Any:
    """What a list holds, or None where the annotation is no list."""
    annotation = bare(annotation)
    return get_args(annotation)[0] if get_origin(annotation) is tuple else None


def variant(section: type[Strict]) -> tuple[str, str] | None:
    """Key and value that pick this variant of a section, e.g. ("name", "length")."""
    for key in ("name", "type"):
        field = section.model_fields.get(key)
        if field is not None and get_origin(field.annotation) is Literal:
            return key, get_args(field.annotation)[0]
    return None


def fields(section: type[Strict], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every setting that holds a plain value, with its dotted key, sections below included.

    A list of sections is given as it is: its keys depend on what is listed.
    """
    for name, field in section.model_fields.items():
        below = sections(field.annotation)
        if len(below) == 1:
            yield from fields(below[0], f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def locate(
    run: type[Strict], loc: tuple[int | str, ...]
) -> tuple[str, type[Strict], FieldInfo | None]:
    """Where a pydantic error is: dotted key, section and field (None: the section has no such key).

    Pydantic's location names the variant or form of a section too, which a dotted key does not.
    """
    key: list[str] = []
    annotation: Any = run
    section: type[Strict] = run
    field: FieldInfo | None = None
    for part in loc:
        found, several = sections(annotation), by_name(annotation)
        if part == _NAME_ITSELF:
            key.pop()
            break
        if isinstance(part, int):
            key.append(str(part))
            annotation = item(annotation)
        elif several is not None and found:
            annotation = found[0] if part == _ONE else several
        elif several is not None:
            key.append(part)
            annotation = get_args(several)[1]
        elif len(found) > 1:
            annotation = next(s for s in found if (variant(s) or ("", ""))[1] == part)
        else:
            section = found[0]
            key.append(part)
            field = section.model_fields.get(part)
            annotation = None if field is None else field.annotation
    return ".".join(key), section, field


def describe_type(field: FieldInfo) -> str:
    """The values a setting takes, in words of YAML."""
    element = item(field.annotation)
    if element is not None:
        return "list of sections" if sections(element) else f"list of {_describe(element)}"
    members = get_args(field.annotation) if _is_union(field.annotation) else (field.annotation,)
    named = [_describe(m) for m in members if m is not types.NoneType]
    bounds = _bounds(field.metadata)
    null = ["null"] if types.NoneType in members else []
    return " | ".join([*(f"{name}{bounds}" for name in named), *null])


def _describe(annotation: Any) -> str:
    plain = bare(annotation)
    if get_origin(plain) is Literal:
        return " | ".join(map(str, get_args(plain)))
    return _TYPE_NAMES[plain] + _bounds(getattr(annotation, "__metadata__", ()))


def _bounds(metadata: Sequence[Any]) -> str:
    found = [f"{_SIGNS[n]} {getattr(m, n)}" for m in metadata for n in _SIGNS if hasattr(m, n)]
    return f" {' and '.join(found)}" if found else ""


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)
