"""Where the processes that write a checkpoint report: a small process of its own."""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
import signal
import sys
from multiprocessing.managers import SyncManager
from typing import Any

_PR_SET_PDEATHSIG = 1


@functools.cache
def results_queue() -> Any:
    """The queue that Megatron's writers put their results into. Ask for it first early.

    Megatron would make one at the first save, by spawn: the new process imports the whole recipe
    again, which takes seconds and needs `if __name__ == "__main__":`. A fork shares what is
    imported; made before the job is joined and the model built, it holds none of their connections
    and memory.
    """
    manager = SyncManager(ctx=multiprocessing.get_context("fork"))
    manager.start(live_and_die_with_parent)
    return manager.Queue()


def live_and_die_with_parent() -> None:
    """Signals that make a rank save and stop are not for this process; the rank's end is."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
