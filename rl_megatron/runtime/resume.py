"""What a run goes on from: its own last checkpoint, one that it is given, or nothing."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_megatron.checkpoint.folders import resolve_model_folder
from rl_megatron.checkpoint.publish import (
    POINTER_FILE,
    iteration_folder,
    read_pointer,
    saved_iterations,
    write_pointer,
)
from rl_megatron.checkpoint.run_state import RunState, read_run_state
from rl_megatron.config.resume import refused_changes
from rl_megatron.config.runs import RunBase
from rl_megatron.config.yaml_file import read_yaml
from rl_megatron.errors import CheckpointError, ConfigError
from rl_megatron.metrics.writer import METRICS_FILE

CONFIG_FILE = "config.yaml"
CHECKPOINTS = "checkpoints"

_SETTING = "checkpoint.resume"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resumed:
    """A checkpoint to go on from.

    Attributes:
        folder: Its iter_ folder.
        state: What it says of the run.
    """

    folder: Path
    state: RunState


def find_checkpoint(run: RunBase) -> Resumed | None:
    """What `run` goes on from, by `checkpoint.resume`; None to begin. By one process.

    Args:
        run: The configuration.

    Raises:
        ConfigError: The run folder holds another run, or any run where resume is "never".
        CheckpointError: A checkpoint that cannot be used.
    """
    folder, resume = Path(run.output_dir), run.checkpoint.resume
    # An attempt that found a mistake before its first step leaves an empty file, and is no run.
    metrics = folder / METRICS_FILE
    has_begun = metrics.exists() and metrics.stat().st_size > 0
    own = folder / CHECKPOINTS
    if resume == "never":
        if has_begun or own.exists():
            raise ConfigError(
                f"output_dir {folder} holds a run already ({METRICS_FILE} or {CHECKPOINTS}/), and "
                f"{_SETTING} is never; name another output_dir, or remove the folder"
            )
        return None
    given = None if resume == "auto" else Path(resume)
    latest = last_checkpoint(own)
    if latest is None and given is not None:
        latest = _given_checkpoint(given)
    elif given is not None and own.resolve() in (given.resolve(), *given.resolve().parents):
        raise ConfigError(
            f"{_SETTING} = {resume}: is a checkpoint of this run itself, which goes on from its "
            f"last one. To go back to an earlier one remove the iter_ folders after it, and "
            f"{POINTER_FILE}"
        )
    if latest is not None:
        state = read_run_state(latest)
        _refuse_changes(run, state.config, str(latest))
        return Resumed(latest, state)
    if has_begun:
        saved = read_yaml(folder / CONFIG_FILE).data
        _refuse_changes(run, saved, f"output_dir {folder}")
        logger.info("%s has no checkpoint yet: the run begins again", folder)
    return None


def last_checkpoint(root: Path) -> Path | None:
    """The folder of the last whole checkpoint in `checkpoints/` of a run; None if there is none.

    Where the pointer is broken, or what it names is, the last whole one before takes its place.

    Raises:
        CheckpointError: There are checkpoints, and none of them is whole.
    """
    saved = saved_iterations(root)
    try:
        iteration = read_pointer(root)
        if iteration is not None:
            return _whole(iteration_folder(root, iteration))
        problem = None
    except CheckpointError as error:
        if not saved:
            raise
        problem = error
    for iteration in reversed(saved):
        try:
            folder = _whole(iteration_folder(root, iteration))
        except CheckpointError as error:
            problem = problem or error
            continue
        if problem is not None:
            logger.warning("%s The run goes on from %s.", problem, folder)
        write_pointer(root, iteration)
        return folder
    if problem is not None:
        raise problem
    return None


def _whole(folder: Path) -> Path:
    """`folder`, in which everything that a checkpoint consists of is there."""
    resolve_model_folder(folder, _SETTING)
    read_run_state(folder)
    return folder


def _given_checkpoint(path: Path) -> Path:
    """The checkpoint that a path means: a run folder, its checkpoints/, or one iter_ folder."""
    if path.name.startswith("iter_"):
        return _whole(path)
    for root in (path, path / CHECKPOINTS):
        if (root / POINTER_FILE).exists() or saved_iterations(root):
            found = last_checkpoint(root)
            assert found is not None
            return found
    kind = "holds no checkpoint" if path.exists() else "does not exist"
    raise CheckpointError(
        f"{_SETTING} = {path}: {kind}; name a run folder, its {CHECKPOINTS}/ or one iter_ folder, "
        "or set it to auto"
    )


def _refuse_changes(run: RunBase, saved: Mapping[str, Any], where: str) -> None:
    changes = refused_changes(run, saved)
    if not changes:
        return
    keys = ", ".join(change.partition(":")[0] for change in changes)
    shown = changes if len(changes) <= 8 else [*changes[:8], f"and {len(changes) - 8} more"]
    raise ConfigError(
        "\n".join(
            [
                f"{where} was saved by a run with other settings; then -> now:",
                *(f"  {change}" for change in shown),
                "Set them back, name another output_dir, or allow what is meant to change: "
                f"checkpoint.allow_changes=[{keys}]",
            ]
        )
    )
