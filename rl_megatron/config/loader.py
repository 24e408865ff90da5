"""A run from a YAML file, its parent and `key.path=value` overrides."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from rl_megatron.config.base import Strict, resolved
from rl_megatron.config.mistakes import find_mistakes
from rl_megatron.config.yaml_file import Settings, dump_yaml, parse_yaml, read_yaml
from rl_megatron.errors import ConfigError

Run = TypeVar("Run", bound=Strict)

COMMAND_LINE = "command line"


def load_run(run_class: type[Run], path: str | Path, overrides: Sequence[str] = ()) -> Run:
    """The run that a YAML file describes.

    Args:
        run_class: One of those that `rl_megatron.config` has.
        path: The file. It may name one parent, `extends: other.yaml`, relative to itself; the
            parent's settings hold wherever the file has none of its own.
        overrides: `key.path=value`, the value in YAML. They win over the file. An item of a list
            is named by its index; `key=` with nothing behind it takes a setting out.

    Raises:
        ConfigError: All that is wrong, one line each.
    """
    settings = _read_with_parent(Path(path))
    _override(settings, overrides)
    return _build(run_class, settings, str(path))


def build_run(run_class: type[Run], data: dict[str, Any]) -> Run:
    """The run that plain data describes; see `load_run`."""
    return _build(run_class, Settings(data), run_class.__name__)


def dump_run(run: Strict) -> str:
    """The run as YAML, defaults included; loading it gives an equal run."""
    plain: dict[str, Any] = resolved(run)
    return dump_yaml(plain)


def _build(run_class: type[Run], settings: Settings, name: str) -> Run:
    found = find_mistakes(run_class, settings.data)
    lines = settings.mistakes + [m.line(settings.origins.get(m.key)) for m in found]
    if lines:
        count = "1 mistake" if len(lines) == 1 else f"{len(lines)} mistakes"
        raise ConfigError("\n".join([f"{count} in {name}:", *(f"  {line}" for line in lines)]))
    return run_class.model_validate(settings.data)


def _read_with_parent(path: Path) -> Settings:
    child = read_yaml(path)
    if child.mistakes and not child.data:
        raise ConfigError("\n".join(child.mistakes))
    if "extends" not in child.data:
        return child
    name, origin = child.data.pop("extends"), child.origins["extends"]
    if not isinstance(name, str):
        child.mistakes.append(f"extends = {name!r} ({origin}): must be the path of one YAML file")
        return child
    parent = read_yaml(path.parent / name)
    if parent.mistakes and not parent.data:
        raise ConfigError(f"extends = {name!r} ({origin}): {'; '.join(parent.mistakes)}")
    if "extends" in parent.data:
        parent.mistakes.append(
            f"extends = {parent.data.pop('extends')!r} ({parent.origins['extends']}): a parent "
            f"cannot have a parent; move its settings into {path.parent / name}"
        )
    return Settings(
        _merge(parent.data, child.data),
        parent.origins | child.origins,
        parent.mistakes + child.mistakes,
    )


def _merge(parent: Any, child: Any) -> Any:
    """The child's settings over the parent's. Lists, and sections of another type, are replaced."""
    if not (isinstance(parent, dict) and isinstance(child, dict)):
        return child
    if parent.get("type") != child.get("type", parent.get("type")):
        return child
    return parent | {key: _merge(parent.get(key), value) for key, value in child.items()}


def _override(settings: Settings, overrides: Sequence[str]) -> None:
    seen = set()
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not all(key.split(".")):
            settings.mistakes.append(f"{override!r} ({COMMAND_LINE}): must be key.path=value")
            continue
        if key in seen:
            settings.mistakes.append(f"{key} ({COMMAND_LINE}): is given twice; remove one")
            continue
        seen.add(key)
        value = parse_yaml(text, COMMAND_LINE, key=key)
        settings.mistakes += [f"{override!r}: {mistake}" for mistake in value.mistakes]
        if not value.mistakes:
            _set(settings, key, value, take_out=not text)


def _set(settings: Settings, key: str, value: Settings, *, take_out: bool) -> None:
    *path, name = key.split(".")
    at: Any = settings.data
    try:
        for depth, part in enumerate(path):
            if isinstance(at, dict) and at.get(part) is None:
                at[part] = {}
            at = at[_index(at, part, ".".join(path[:depth]))]
        index = _index(at, name, ".".join(path))
    except KeyError as error:
        settings.mistakes.append(f"{key} ({COMMAND_LINE}): {error.args[0]}")
        return
    if not take_out:
        at[index] = value.data
        settings.origins |= value.origins
    elif isinstance(at, list) or index in at:
        del at[index]


def _index(at: Any, name: str, where: str) -> Any:
    """What `name` is in `at`: a key of a section, or an index of a list."""
    if isinstance(at, dict):
        return name
    if not isinstance(at, list):
        raise KeyError(f"{where} is not a section")
    if not (name.isdigit() and int(name) < len(at)):
        raise KeyError(f"{where} has no item {name}; it has {len(at)}, counted from 0")
    return int(name)
