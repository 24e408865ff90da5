"""Nothing half-written is ever taken for whole: write aside, fsync, rename, then say so."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

from rl_megatron.errors import CheckpointError
from rl_megatron.parallel.process import Process

POINTER_FILE = "latest_checkpointed_iteration.txt"

_DELETED = ".deleted.tmp"


def iteration_folder(root: Path, iteration: int) -> Path:
    """`iter_0000100` of iteration 100."""
    return root / f"iter_{iteration:07d}"


def read_pointer(root: Path) -> int | None:
    """Iteration of the last durable checkpoint; None where there is none yet.

    Raises:
        CheckpointError: The pointer is empty, not a number, or names a folder that is not there.
    """
    path, text = root / POINTER_FILE, _pointer_text(root)
    if text is None:
        return None
    if not text.isdigit():
        raise CheckpointError(
            f"{path} holds {text!r}, not a number. Write the number of a complete iter_ folder "
            "into it, or name such a folder itself."
        )
    if not iteration_folder(root, int(text)).is_dir():
        raise CheckpointError(
            f"{path} names {iteration_folder(root, int(text)).name}, which is not there. Write "
            "the number of a complete iter_ folder into it, or copy the folder again."
        )
    return int(text)


@contextmanager
def durable_file(path: Path) -> Iterator[Path]:
    """A name to write to that becomes `path`, whole and durable, on leaving.

    The name is nobody else's: two jobs may write one file, and numbers of processes begin again in
    every container. The file is that of the last one.
    """
    aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        yield aside
        _fsync(aside)
        aside.rename(path)
    finally:
        aside.unlink(missing_ok=True)
    _fsync(path.parent)


class NewFolder:
    """A folder that is written aside, as `<name>.<attempt>.tmp`, and then published whole.

    Every method is called by all ranks together. The name aside is new each time: what a killed
    process still writes never lands in the folder of its successor.

    Args:
        folder: The final folder. Leftovers of earlier attempts at it are removed.
        process: This rank.
        replace: Whether an existing `folder` may be removed.

    Attributes:
        aside: Where to write; it exists and is empty.

    Raises:
        CheckpointError: `folder` exists and may not be replaced.
    """

    def __init__(self, folder: Path, process: Process, *, replace: bool = False) -> None:
        if folder.exists() and not replace:
            raise CheckpointError(
                f"{folder} exists already. Remove it, or name another output folder."
            )
        self._folder = folder
        self._process = process
        self.aside = folder.with_name(process.from_main(lambda: self._make_aside().name))

    def publish(self) -> None:
        """Make the folder durable, and give it its name."""
        self._process.barrier()
        if self._process.is_main:
            _fsync_tree(self.aside)
            if self._folder.exists():
                shutil.rmtree(self._folder)
            self.aside.rename(self._folder)
            _fsync(self._folder.parent)
        self._process.barrier()

    def _make_aside(self) -> Path:
        name = self._folder.name
        for leftover in self._folder.parent.glob(f"{name}*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)
        aside = self._folder.with_name(f"{name}.{os.getpid()}-{time.time_ns()}.tmp")
        aside.mkdir(parents=True)
        return aside


class NewCheckpoint:
    """A checkpoint that is written aside; once it is published it is the latest one. Collective.

    The pointer is written last, so that a checkpoint counts only once all of it is durable. A
    folder of the same name that the pointer does not name is what a killed run left: replaced.

    Args:
        root: `checkpoints/` of a run.
        iteration: Its number.
        process: This rank.

    Raises:
        CheckpointError: This iteration is already the latest checkpoint.
    """

    def __init__(self, root: Path, iteration: int, process: Process) -> None:
        stale = _pointer_text(root) != str(iteration)
        self._root = root
        self._iteration = iteration
        self._process = process
        self._folder = NewFolder(iteration_folder(root, iteration), process, replace=stale)
        self.aside = self._folder.aside

    def publish(self, keep_last: int | None = None) -> None:
        """Make it the latest one; then delete all but the last `keep_last`, if that is given."""
        self._folder.publish()
        if self._process.is_main:
            write_pointer(self._root, self._iteration)
            if keep_last is not None:
                _delete_old(self._root, self._iteration, keep_last)
        self._process.barrier()


@contextmanager
def new_folder(folder: Path, process: Process, *, replace: bool = False) -> Iterator[Path]:
    """A folder to write into that becomes `folder`, whole, on leaving; see `NewFolder`.

    After an exception nothing is renamed.
    """
    new = NewFolder(folder, process, replace=replace)
    yield new.aside
    new.publish()


@contextmanager
def new_checkpoint(root: Path, iteration: int, process: Process) -> Iterator[Path]:
    """An empty folder to write a checkpoint into; on leaving it is the latest one; see
    `NewCheckpoint`."""
    new = NewCheckpoint(root, iteration, process)
    yield new.aside
    new.publish()


def saved_iterations(root: Path) -> list[int]:
    """Numbers of the checkpoints that have their name, and so are whole; the last one last."""
    names = (re.fullmatch(r"iter_(\d{7,})", path.name) for path in root.glob("iter_*"))
    return sorted(int(match[1]) for match in names if match)


def write_pointer(root: Path, iteration: int) -> None:
    """Say that `iteration` is the latest checkpoint; by one process."""
    with durable_file(root / POINTER_FILE) as aside:
        aside.write_text(f"{iteration}\n", encoding="utf-8")


def _delete_old(root: Path, latest: int, keep_last: int) -> None:
    """Take the names of old checkpoints away now; training does not wait until all of it is gone.

    What a deletion leaves that is cut short goes with the next one.
    """
    old = [iteration for iteration in saved_iterations(root) if iteration <= latest][:-keep_last]
    for iteration in old:
        folder = iteration_folder(root, iteration)
        folder.rename(folder.with_name(f"{folder.name}{_DELETED}"))
    doomed = list(root.glob(f"iter_*{_DELETED}"))
    if doomed:
        Thread(target=_delete, args=(doomed,), name="delete-checkpoints").start()


def _delete(folders: Sequence[Path]) -> None:
    for folder in folders:
        # Another deletion may be at the same one.
        shutil.rmtree(folder, ignore_errors=True)


def _pointer_text(root: Path) -> str | None:
    path = root / POINTER_FILE
    return path.read_text(encoding="utf-8").strip() if path.exists() else None


def _fsync_tree(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        _fsync(path)


def _fsync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
