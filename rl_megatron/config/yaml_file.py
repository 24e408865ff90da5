"""YAML to plain data and back, with the place of every key.

PyYAML reads `1e-6` as text and lets a key appear twice; here it is a number, and an error.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

_FLOAT = re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$")
_FLOAT_TAG = "tag:yaml.org,2002:float"


class _Loader(yaml.SafeLoader):
    """A SafeLoader to which `1e-6` is a number."""


class _Dumper(yaml.SafeDumper):
    """A SafeDumper that quotes text which `_Loader` would take for a number."""


for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver(_FLOAT_TAG, _FLOAT, list("-+.0123456789"))


@dataclass
class Settings:
    """What a file or an override says.

    Attributes:
        data: Plain data: mostly a dict of sections.
        origins: Where each dotted key was set, e.g. "grpo.yaml:12".
        mistakes: What was wrong in the writing, one line each.
    """

    data: Any
    origins: dict[str, str] = field(default_factory=dict)
    mistakes: list[str] = field(default_factory=list)


def read_yaml(path: Path) -> Settings:
    """The settings in a file; `mistakes` says so if it cannot be read."""
    if not path.is_file():
        return Settings({}, mistakes=[f"{path}: no such file; check the path"])
    settings = parse_yaml(path.read_bytes(), str(path), numbered=True)
    if settings.data is None:
        settings.data = {}
    if not isinstance(settings.data, dict):
        settings.mistakes.append(f"{path}: must hold settings, one `key: value` a line")
        settings.data = {}
    return settings


def parse_yaml(text: str | bytes, where: str, *, key: str = "", numbered: bool = False) -> Settings:
    """The settings in `text`, whose keys lie below `key`; line numbers in origins if `numbered`."""
    settings = Settings(None)
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is not None:
            settings.data = _Reader(loader, where, numbered, settings).read(node, key)
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if numbered and error.problem_mark else ""
        settings.mistakes.append(f"{where}{line}: not valid YAML: {error.problem}")
    except yaml.YAMLError as error:
        settings.mistakes.append(f"{where}: not valid YAML: {error}")
    return settings


def dump_yaml(data: dict[str, Any]) -> str:
    """Plain data as YAML that `read_yaml` reads back to the same, in the order given."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)


@dataclass
class _Reader:
    loader: _Loader
    where: str
    numbered: bool
    settings: Settings

    def read(self, node: yaml.Node, key: str) -> Any:
        self.settings.origins[key] = self._place(node)
        below = f"{key}." if key else ""
        if isinstance(node, yaml.SequenceNode):
            return [self.read(item, f"{below}{i}") for i, item in enumerate(node.value)]
        if not isinstance(node, yaml.MappingNode):
            return self.loader.construct_object(node, deep=True)
        data: dict[str, Any] = {}
        first_place: dict[str, str] = {}
        for name_node, value in node.value:
            name = str(getattr(name_node, "value", ""))
            if name in data:
                self.settings.mistakes.append(
                    f"{below}{name} is given twice, at {first_place[name]} and at "
                    f"{self._place(name_node)}; remove one"
                )
            first_place.setdefault(name, self._place(name_node))
            earlier, read = data.get(name), self.read(value, f"{below}{name}")
            if isinstance(earlier, dict) and isinstance(read, dict):
                read = {**earlier, **read}
            data[name] = read
            self.settings.origins[f"{below}{name}"] = self._place(name_node)
        return data

    def _place(self, node: yaml.Node) -> str:
        return f"{self.where}:{node.start_mark.line + 1}" if self.numbered else self.where
