"""What tools/chaos.py sees of a run from outside: its saves, and its first new step."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from rl_megatron.checkpoint.publish import read_pointer, saved_iterations
from rl_megatron.errors import CheckpointError
from rl_megatron.metrics.jsonl import read_jsonl
from rl_megatron.metrics.writer import METRICS_FILE
from rl_megatron.runtime.resume import CHECKPOINTS

# Between two things that a save of the tiny model does pass up to 15 ms, and 50 or more from the
# last piece that is written to its publishing.
QUIET_SECONDS = 0.02


class SaveWatch:
    """The saves of an attempt, by what changes in `checkpoints/`.

    A new checkpoint lies there, written and not yet published, until the end of the next step. So
    a save is under way only while something changes: a file is made, grows, gets its name or goes.

    Args:
        root: `checkpoints/` of the run, before the attempt starts.

    Attributes:
        iteration: Number of the checkpoint whose save has begun last; 0 before the first.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._seen = self._asides()
        self.iteration = 0

    def look(self) -> None:
        """See whether a save has begun since the last look."""
        new = {n: number for n, number in self._asides().items() if n not in self._seen}
        self._seen |= new
        self.iteration = max(new.values(), default=self.iteration)

    def last_change(self) -> float:
        """When something changed last, in seconds since the epoch; 0 before the first save."""
        return max((_changed(path) for path in self._watched()), default=0.0)

    def is_saving(self) -> bool:
        """Whether a checkpoint is being written, published or deleted at this moment."""
        return time.time() - self.last_change() < QUIET_SECONDS

    def _asides(self) -> dict[str, int]:
        """Names of checkpoints that are being written, and their numbers."""
        names = (
            re.fullmatch(r"iter_(\d+)\.[\d-]+\.tmp", path.name)
            for path in self._root.glob("iter_*.tmp")
        )
        return {name[0]: int(name[1]) for name in names if name}

    def _watched(self) -> Iterator[Path]:
        """All that a save changes; names that are given and taken change their folder."""
        yield self._root
        for folder in self._root.glob("iter_*.tmp"):
            # What is being deleted may be gone before it is looked at.
            for at, _, files in os.walk(folder):
                yield Path(at)
                yield from (Path(at, name) for name in files)


class FirstStep:
    """When an attempt has made its first new step, by `metrics.jsonl`.

    Args:
        folder: The run folder, before the attempt starts.

    Attributes:
        saved: Number of the checkpoint that the attempt goes on from; 0: from none.
        seconds: The moment, by the clock of `look`; None before.
    """

    def __init__(self, folder: Path) -> None:
        self._metrics = folder / METRICS_FILE
        # An attempt writes the file anew, with the rows that stay, before it adds one.
        self._old = self._inode()
        self.saved = saved_step(folder / CHECKPOINTS)
        self.seconds: float | None = None

    def look(self, now: float) -> None:
        """Take `now` for the moment if the step was made since the last look."""
        is_new = self.seconds is None and self._inode() not in (None, self._old)
        if is_new and any(row["step"] > self.saved for row in read_jsonl(self._metrics)):
            self.seconds = now

    def _inode(self) -> int | None:
        return self._metrics.stat().st_ino if self._metrics.exists() else None


def saved_step(root: Path) -> int:
    """Number of the checkpoint in `checkpoints/` that an attempt would go on from; 0: of none."""
    try:
        pointed = read_pointer(root)
    except CheckpointError:
        # What it names is not there: the last one that is takes its place.
        pointed = None
    return pointed or max(saved_iterations(root), default=0)


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        # It has another name by now, and its folder has changed.
        return 0.0
