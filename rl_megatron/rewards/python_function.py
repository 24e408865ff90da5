"""A reward that is a function of the user's own."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from rl_megatron.errors import ConfigError

UserReward = Callable[[str, str, str | None], object]
"""(prompt, response, answer) -> a number, or None for a response that it does not score."""


def load_function(path: str) -> UserReward:
    """The function that `path/to/file.py:function` or `package.module:function` names.

    Raises:
        ConfigError: There is no such file, module or function.
    """
    source, _, name = path.rpartition(":")
    module = _load_file(Path(source), path) if source.endswith(".py") else _load(source, path)
    function = getattr(module, name, None)
    if not callable(function):
        names = sorted(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))
        raise ConfigError(
            f"rewards.python.path: {path!r} names no function; {source} has {', '.join(names)}"
            if names
            else f"rewards.python.path: {path!r} names no function; {source} has none: define it"
        )
    return function  # type: ignore[no-any-return]


def _load_file(file: Path, path: str) -> ModuleType:
    if not file.is_file():
        raise ConfigError(
            f"rewards.python.path: {path!r}: there is no file {file} under {Path.cwd()}; "
            "correct the path (it is relative to where the run was started)"
        )
    # Registered under a name of its own, so that dataclasses and pickles in it work and a file
    # called e.g. math.py takes no other module's place.
    name = "user_reward_" + "_".join(file.resolve().with_suffix("").parts[1:])
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, f"{file} ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _load(module: str, path: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"rewards.python.path: {path!r}: {error}; install the package that has it, or give a "
            "file as path/to/file.py:function"
        ) from error
