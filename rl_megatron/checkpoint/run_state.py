"""What a run is besides weights: how far it is, and where its data and controllers stand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rl_megatron.errors import CheckpointError

STATE_FILE = "run_state.json"

FORMAT = 1


@dataclass(frozen=True)
class RunState:
    """Written into every checkpoint of a run.

    Attributes:
        step: Optimiser steps that are done.
        round: Rounds of the recipe's loop that are done: steps, or rollout batches of GRPO.
        wall_seconds: Time the run has taken, over all attempts.
        config: The resolved configuration.
        layout: Parallel degrees by name, those that decide how the state of ranks is cut.
        parts: State by name of whatever the recipe carries along (`Stateful`).
        format: Of this file.
    """

    step: int
    round: int
    wall_seconds: float
    config: dict[str, Any]
    layout: dict[str, Any]
    parts: dict[str, Any]
    format: int = FORMAT

    def write(self, folder: Path) -> None:
        """Write it into the folder of a checkpoint."""
        text = json.dumps(asdict(self), indent=1) + "\n"
        (folder / STATE_FILE).write_text(text, encoding="utf-8")

    def part(self, name: str, folder: Path) -> Mapping[str, Any]:
        """The state of one part.

        Raises:
            CheckpointError: There is none; that of another recipe, or of another version.
        """
        if name not in self.parts:
            raise CheckpointError(
                f"{folder / STATE_FILE} has no {name!r}, only {sorted(self.parts)}: it was saved "
                "by another recipe or version. Start from its weights in a new output_dir "
                "(model.path), or name another checkpoint."
            )
        part: Mapping[str, Any] = self.parts[name]
        return part


def read_run_state(folder: Path) -> RunState:
    """What `RunState.write` wrote into the folder of a checkpoint.

    Raises:
        CheckpointError: The file is missing, cut short, or of another format.
    """
    path = folder / STATE_FILE
    try:
        row = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}): no run can go on from this folder. Name another "
            "checkpoint (checkpoint.resume), or start from its weights in a new output_dir "
            "(model.path)."
        ) from error
    if not isinstance(row, dict) or row.get("format") != FORMAT:
        found = row.get("format") if isinstance(row, dict) else row
        raise CheckpointError(
            f"{path} has format {found!r}, and this version reads {FORMAT}. Go on with the version "
            "that wrote it, or start from its weights in a new output_dir (model.path)."
        )
    return RunState(**row)
