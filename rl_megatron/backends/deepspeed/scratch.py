"""A folder on a local disk for what one model of one rank offloads.

DeepSpeed's own names are the same for every model and every job, and it empties them as it starts:
two that share a disk would read each other's numbers.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path

from rl_megatron.errors import ConfigError

_PREFIX = "rl_megatron_offload_"


class Scratch:
    """Makes the folder, and removes those of processes that are gone.

    Args:
        root: Where: `deepspeed.nvme_path`; made if it is missing.

    Attributes:
        folder: The new one.

    Raises:
        ConfigError: Nothing can be written there.
    """

    def __init__(self, root: Path) -> None:
        try:
            root.mkdir(parents=True, exist_ok=True)
            for other in root.glob(f"{_PREFIX}*"):
                _remove_if_left(other)
            self.folder, lock = _new_folder(root)
        except OSError as error:
            raise ConfigError(
                f"deepspeed.nvme_path = {str(root)!r}: {error}; name a folder on a local disk that "
                "this job may write to"
            ) from error
        # Also where the process ends, unless it is killed.
        self._removal = weakref.finalize(self, _remove, self.folder, lock)

    def close(self) -> None:
        """Remove it."""
        self._removal()


def _new_folder(root: Path) -> tuple[Path, int]:
    """A folder and its lock, held until the process ends, however it does."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
        lock = _locked(folder)
        # Another process that starts now may have taken it for one that was left.
        if lock is not None and folder.exists():
            return folder, lock


def _remove_if_left(folder: Path) -> None:
    lock = _locked(folder)
    if lock is not None:
        _remove(folder, lock)


def _remove(folder: Path, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


def _locked(folder: Path) -> int | None:
    """The lock of a folder that nobody else has, held until it is closed."""
    with suppress(FileNotFoundError):
        lock = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
        else:
            return lock
    return None
