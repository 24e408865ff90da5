"""Work that a fork of this process does while this one goes on."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection

from rl_megatron.checkpoint.writer_results import live_and_die_with_parent

_CONTEXT = multiprocessing.get_context("fork")


class Forked:
    """A process that does `work` with the memory of this moment, and dies with its rank.

    What `work` calls must need no other thread and no device: the fork has neither. Writing bytes
    is fine, a large computation of torch is not (it waits for threads that are not there).

    Args:
        work: What to do. An OSError is its way to fail.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        self._reasons, sender = _CONTEXT.Pipe(duplex=False)
        self._process = _CONTEXT.Process(target=_run, args=(work, sender), daemon=True)
        self._process.start()
        sender.close()

    def is_done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._process.is_alive()

    def wait(self) -> str | None:
        """Wait for its end; why it failed, None if it did not."""
        self._process.join()
        if self._process.exitcode == 0:
            return None
        try:
            reason: str = self._reasons.recv()
        except EOFError:
            return f"the process that writes ended with code {self._process.exitcode}"
        return reason


def _run(work: Callable[[], object], sender: Connection) -> None:
    live_and_die_with_parent()
    # Collecting would touch, and so copy, memory that is shared with the rank.
    gc.disable()
    try:
        work()
    except OSError as error:
        sender.send(str(error))
        raise SystemExit(1) from error
