"""Writes the parts of a checkpoint while training goes on with its next step.

Nothing is copied: weights and the optimizer's state stand still from one update to the next, and
most of a round lies between two. Who updates waits until all has been read (`Saving.settle`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any, Protocol

from rl_megatron.errors import CheckpointError
from rl_megatron.parallel.process import Process


class Part(Protocol):
    """What a rank writes, as it is when this is made. What lies on a GPU has been copied by then.

    Attributes:
        files: What `write` makes.
        reads_live: Whether it reads the state itself and no copy.
    """

    files: Sequence[Path]
    reads_live: bool

    def write(self) -> Any:
        """Write them, by a thread of its own; what it returns is for `finish`.

        Raises OSError where it cannot.
        """
        ...

    def finish(self, written: Any) -> None:
        """Make them readable, now that those of all ranks are on disk. Called by all together."""
        ...


class Saving:
    """A save that is under way; see `PendingSave`, and `save_parts`."""

    def __init__(self, folder: Path, process: Process, parts: Sequence[Part]) -> None:
        self._folder = folder
        self._process = process
        self._parts = parts
        self._is_read = Event()
        if not any(part.reads_live for part in parts):
            self._is_read.set()
        self._is_finished = False
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._written: Future[list[Any]] = thread.submit(self._write)
        thread.shutdown(wait=False)

    def settle(self) -> None:
        """Wait until nothing is read any more of what is saved: from then on it may change."""
        self._is_read.wait()

    def is_done(self) -> bool:
        """Whether this rank has nothing more to write."""
        return self._written.done()

    def finish(self) -> None:
        """Wait until all ranks have written, and make it readable. Collective.

        Only the first call does anything.

        Raises:
            CheckpointError: A rank could not write; on all ranks.
        """
        if self._is_finished:
            return
        self._is_finished = True
        error = self._written.exception()
        if error is not None and not isinstance(error, OSError):
            raise error
        reasons = self._process.gather(None if error is None else str(error))
        for rank, reason in enumerate(reasons):
            if reason is not None:
                raise CheckpointError(f"{self._folder} cannot be written: rank {rank}: {reason}")
        for part, answer in zip(self._parts, self._written.result(), strict=True):
            part.finish(answer)

    def _write(self) -> list[Any]:
        try:
            answers = [part.write() for part in self._parts]
        finally:
            self._is_read.set()
        for part in self._parts:
            for path in part.files:
                _fsync(path)
        return answers


def save_parts(
    folder: Path, process: Process, parts: Sequence[Part], *, background: bool
) -> Saving:
    """Begin to write. Called by all ranks together.

    Args:
        folder: Where to, for messages.
        process: This rank.
        parts: What it writes, in this order.
        background: Return at once: before anything of it changes, `Saving.settle` must be called.

    Raises:
        CheckpointError: A rank could not write, and nothing goes on in the background.
    """
    saving = Saving(folder, process, parts)
    if not background:
        saving.finish()
    return saving


def _fsync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
