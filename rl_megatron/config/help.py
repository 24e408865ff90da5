"""The text of --help, from the models themselves."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from pydantic.fields import FieldInfo

from rl_megatron.config.base import Strict
from rl_megatron.config.mistakes import show
from rl_megatron.config.schema import describe_type, item, sections, variant

_USAGE = """\
usage: {program} CONFIG.yaml [key.path=value ...] [--print-config] [--help]

{description}

  CONFIG.yaml      the run; `extends: other.yaml` in it names one parent, relative to the file
  key.path=value   wins over the file; the value is YAML; `key.path=` takes a setting out again
  --print-config   print the whole run, defaults included, and stop
  --help           print this and stop
"""


def help_text(run: type[Strict], program: str, description: str, width: int = 100) -> str:
    """Usage, then every setting with its type, its default and what it does."""
    lines = [_USAGE.format(program=program, description=description), "settings:"]
    lines += _Settings(width).section(run, "")
    return "\n".join(lines) + "\n"


class _Settings:
    """Lists settings; a section that occurs under several keys is listed once."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._listed: dict[tuple[type[Strict], ...], str] = {}

    def section(self, section: type[Strict], prefix: str) -> Iterator[str]:
        """Plain settings first, then the sections below, those that may be null last."""
        fields = section.model_fields.items()
        for name, field in fields:
            if not _below(field):
                yield from self._setting(f"{prefix}{name}", field)
        for optional in (False, True):
            for name, field in fields:
                if _below(field) and (field.default is None) == optional:
                    yield from self._sections_below(f"{prefix}{name}", field)

    def _sections_below(self, key: str, field: FieldInfo) -> Iterator[str]:
        below = _below(field)
        own = below[0].__doc__ if len(below) == 1 else ""
        yield ""
        yield from self._wrapped(f"{key}: {_one_line(field.description or own)}")
        if tuple(below) in self._listed:
            yield f"  settings as in {self._listed[tuple(below)]}"
            return
        self._listed[tuple(below)] = key
        if len(below) == 1:
            yield from self.section(below[0], f"{key}.")
            return
        for variant_of in below:
            yield from self._variant(variant_of, f"{key}[]" if item(field.annotation) else key)

    def _variant(self, section: type[Strict], key: str) -> Iterator[str]:
        picked = variant(section)
        assert picked is not None, "the variants of a section have a name"
        about = f"{key}.{picked[0]}={picked[1]}: {_one_line(section.__doc__)}"
        yield from self._wrapped(about, "  ", "      ")
        for name, field in section.model_fields.items():
            if name != picked[0]:
                yield from self._setting(f"  {key}.{name}", field)

    def _setting(self, key: str, field: FieldInfo) -> Iterator[str]:
        default = f"  (default {show(field.default)})"
        if field.default_factory:
            default = ""
        elif field.is_required():
            default = "  (required)"
        yield from self._wrapped(f"  {key}: {describe_type(field)}{default}", "", "      ")
        yield from self._wrapped(_one_line(field.description), "      ", "      ")

    def _wrapped(self, text: str, first: str = "", further: str = "  ") -> list[str]:
        return textwrap.wrap(text, self._width, initial_indent=first, subsequent_indent=further)


def _below(field: FieldInfo) -> list[type[Strict]]:
    return sections(item(field.annotation) or field.annotation)


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())
