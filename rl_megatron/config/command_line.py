"""The command line of every recipe: CONFIG.yaml key.path=value ... and a few options."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from rl_megatron.config.help import help_text
from rl_megatron.config.loader import Run, build_run, dump_run, load_run
from rl_megatron.config.parallel import ParallelConfig
from rl_megatron.errors import ConfigError

EXIT_MISTAKE = 2


def parse_command_line(
    run_class: type[Run], description: str, argv: Sequence[str] | None = None
) -> Run:
    """The run that the command line asks for.

    Args:
        run_class: One of those that `rl_megatron.config` has.
        description: What the recipe does, for --help.
        argv: The arguments, the program's name left out; default: those of this process.

    Raises:
        SystemExit: 0 after --help or --print-config; 2 after a mistake, which is then on stderr.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = {argument for argument in arguments if argument.startswith("-")}
    if options & {"--help", "-h"}:
        width = min(shutil.get_terminal_size((100, 24)).columns, 100)
        _write_once(sys.stdout, help_text(run_class, Path(sys.argv[0]).name, description, width))
        raise SystemExit(0)
    try:
        run = _load(run_class, arguments, options)
    except ConfigError as error:
        _write_once(sys.stderr, f"{error}\n")
        raise SystemExit(EXIT_MISTAKE) from None
    if "--print-config" in options:
        _write_once(sys.stdout, dump_run(run))
        raise SystemExit(0)
    return run


def parse_parallel(settings: Sequence[str]) -> ParallelConfig:
    """The layout that a tool is given as `setting=value`, e.g. tensor_model_parallel_size=2.

    Raises:
        ConfigError: What is wrong, by name.
    """
    values: dict[str, object] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"{setting!r} must be setting=value, e.g. {key}=2")
        if key in values:
            raise ConfigError(f"{key} is given twice; remove one")
        words: dict[str, object] = {"true": True, "false": False}
        values[key] = words.get(value, int(value) if value.isdigit() else value)
    return build_run(ParallelConfig, values)


def _load(run_class: type[Run], arguments: list[str], options: set[str]) -> Run:
    unknown = sorted(options - {"--print-config", "--trace-shapes"})
    if unknown:
        raise ConfigError(
            f"unknown option {unknown[0]}: there are --print-config, --trace-shapes and --help; "
            "a setting is written key.path=value, without dashes"
        )
    words = [argument for argument in arguments if argument not in options]
    files = [word for word in words if "=" not in word]
    if len(files) != 1:
        given = f"{len(files)} files ({', '.join(files)})" if files else "no file"
        raise ConfigError(f"{given} given: name one CONFIG.yaml; --help says more")
    overrides = [word for word in words if word is not files[0]]
    if "--trace-shapes" in options:
        overrides.append("logging.trace_shapes=true")
    return load_run(run_class, files[0], overrides)


def _write_once(stream: TextIO, text: str) -> None:
    """Under torchrun every rank gets here; the first one speaks."""
    if os.environ.get("RANK", "0") == "0":
        stream.write(text)
