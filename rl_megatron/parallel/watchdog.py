"""Ends a process that does not come further: a job that hangs would hold its nodes to the end."""

from __future__ import annotations

import faulthandler
import threading
import time
from collections.abc import Callable

_POLLS = 20


class _Watchdog(threading.Thread):
    def __init__(self, limit_seconds: float, on_hang: Callable[[float], None]) -> None:
        super().__init__(name="watchdog", daemon=True)
        self._limit_seconds = limit_seconds
        self._on_hang = on_hang
        self._stopped = threading.Event()
        self.last_beat = time.monotonic()

    def run(self) -> None:
        while not self._stopped.wait(self._limit_seconds / _POLLS):
            # This thread itself cannot run while native code holds the interpreter's lock: then
            # the one of faulthandler, which needs no lock, ends the process.
            faulthandler.dump_traceback_later(2 * self._limit_seconds, exit=True)
            still_seconds = time.monotonic() - self.last_beat
            if still_seconds > self._limit_seconds:
                self._on_hang(still_seconds)
                return

    def end(self) -> None:
        self._stopped.set()
        self.join()
        faulthandler.cancel_dump_traceback_later()


_running: list[_Watchdog] = []


def start(limit_seconds: float, on_hang: Callable[[float], None]) -> None:
    """Call `on_hang` with the seconds without a `beat`, once there are more than the limit.

    It is called in a thread of its own, and is to end the process.
    """
    stop()
    _running.append(_Watchdog(limit_seconds, on_hang))
    _running[0].start()


def beat() -> None:
    """Something has got done. Costs nothing; does nothing where no watchdog runs."""
    for watchdog in _running:
        watchdog.last_beat = time.monotonic()


def stop() -> None:
    """Watch no longer."""
    while _running:
        _running.pop().end()
