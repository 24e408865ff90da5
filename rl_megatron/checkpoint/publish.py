"""Nothing half-written is ever taken for whole: write aside, fsync, rename, then say so."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rl_megatron.errors import CheckpointError
from rl_megatron.parallel.process import Process

POINTER_FILE = "latest_checkpointed_iteration.txt"


def iteration_folder(root: Path, iteration: int) -> Path:
    """`iter_0000100` of iteration 100."""
    return root / f"iter_{iteration:07d}"


def read_pointer(root: Path) -> int | None:
    """Iteration of the last durable checkpoint; None where there is none yet.

    Raises:
        CheckpointError: The pointer is empty, not a number, or names a folder that is not there.
    """
    path = root / POINTER_FILE
    if not path.exists():
        return None
    text = path.read_text(encoding="utf-8").strip()
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
    """A name to write to that becomes `path`, whole and durable, on leaving; by one process."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield aside
        _fsync(aside)
        aside.rename(path)
    finally:
        aside.unlink(missing_ok=True)
    _fsync(path.parent)


@contextmanager
def new_folder(folder: Path, process: Process, *, replace: bool = False) -> Iterator[Path]:
    """A folder to write into (`<name>.tmp`) that becomes `folder`, whole, on leaving. Collective.

    Leftovers of a killed attempt are removed first. After an exception nothing is renamed.

    Args:
        folder: The final folder.
        process: This rank.
        replace: Whether an existing `folder` may be removed.

    Raises:
        CheckpointError: `folder` exists and may not be replaced.
    """
    if folder.exists() and not replace:
        raise CheckpointError(f"{folder} exists already. Remove it, or name another output folder.")
    aside = folder.with_name(folder.name + ".tmp")
    process.barrier()
    if process.is_main:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    process.barrier()
    yield aside
    process.barrier()
    if process.is_main:
        _fsync_tree(aside)
        if folder.exists():
            shutil.rmtree(folder)
        aside.rename(folder)
        _fsync(folder.parent)
    process.barrier()


@contextmanager
def new_checkpoint(root: Path, iteration: int, process: Process) -> Iterator[Path]:
    """An empty folder to write a checkpoint into; on leaving it is the latest one. Collective.

    The pointer is written last, so that a checkpoint counts only once all of it is durable. A
    folder of the same name that the pointer does not name is what a killed run left: replaced.

    Raises:
        CheckpointError: This iteration is already the latest checkpoint.
    """
    stale = read_pointer(root) != iteration
    with new_folder(iteration_folder(root, iteration), process, replace=stale) as folder:
        yield folder
    if process.is_main:
        _write_pointer(root, iteration)
    process.barrier()


def _write_pointer(root: Path, iteration: int) -> None:
    with durable_file(root / POINTER_FILE) as aside:
        aside.write_text(f"{iteration}\n", encoding="utf-8")


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
