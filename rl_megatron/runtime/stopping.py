"""When a run saves and leaves before its end: a signal, a time limit, the end of the allocation.

All ranks must save the same step, so what one of them was told is agreed on at the end of a round.
"""

from __future__ import annotations

import os
import signal
import time
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from rl_megatron.config.checkpoint import CheckpointConfig
from rl_megatron.errors import ConfigError
from rl_megatron.parallel.process import Process

EXIT_REQUEUE = 75
"""The run has saved and wants to go on: EX_TEMPFAIL of sysexits.h."""

END_OF_ALLOCATION = "SLURM_JOB_END_TIME"

_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
_REASONS = (
    "",
    "a signal asked for it",
    "checkpoint.exit_duration_in_minutes is over",
    f"the allocation ends soon ({END_OF_ALLOCATION}, checkpoint.exit_before_end_minutes)",
)
_SIGNAL, _DURATION, _ALLOCATION = 1, 2, 3


class Requeue(Exception):  # noqa: N818 - leaving is no error
    """The run has saved and leaves to be started again."""


class StopRequest:
    """Whether the run is to leave at the end of the round.

    Args:
        settings: The time limits.
        started: When the attempt began, in seconds since the epoch.
    """

    def __init__(self, settings: CheckpointConfig, started: float) -> None:
        self._settings = settings
        self._started = self._round_began = started
        self._longest_round = 0.0
        self._signalled = False
        self._handlers: dict[signal.Signals, Any] = {}

    def check(self) -> None:
        """Refuse an allocation that ends before anything could be done.

        Raises:
            ConfigError: Every attempt would make one round and be requeued.
        """
        end, spare = _end_of_allocation(), self._settings.exit_before_end_minutes
        left = None if end is None else (end - self._started) / 60
        if left is not None and left < spare:
            raise ConfigError(
                f"checkpoint.exit_before_end_minutes = {spare:g}: the allocation has only "
                f"{max(left, 0):.1f} minutes left ({END_OF_ALLOCATION}); ask for more time, or "
                "lower it"
            )

    def listen(self) -> None:
        """From now on signals only ask; also a second one while the first is being answered."""
        self._handlers = {number: signal.signal(number, self._hear) for number in _SIGNALS}
        _listening.append(self)

    def stop_listening(self) -> None:
        """Let signals do what they did before."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}
        _listening.remove(self)

    def round_begins(self) -> None:
        """A round takes about as long as the longest one so far."""
        self._round_began = time.time()

    def agreed(self, process: Process) -> str | None:
        """Why the run is to leave after the round that is over, if any rank has a reason."""
        self._longest_round = max(self._longest_round, time.time() - self._round_began)
        return self.asked(process)

    def asked(self, process: Process) -> str | None:
        """The same before the first round."""
        mine = torch.tensor(self._reason(time.time()))
        return _REASONS[int(process.all_reduce(mine, op=dist.ReduceOp.MAX))] or None

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True

    def _reason(self, now: float) -> int:
        if self._signalled:
            return _SIGNAL
        limit, end = self._settings.exit_duration_in_minutes, _end_of_allocation()
        if limit is not None and now - self._started >= 60 * limit:
            return _DURATION
        spare = 60 * self._settings.exit_before_end_minutes
        if end is not None and now + self._longest_round + spare > end:
            return _ALLOCATION
        return 0


_listening: list[StopRequest] = []


def leave_if_asked(process: Process) -> None:
    """To be called between the parts of long work before the first round. Collective.

    Raises:
        Requeue: The job is to leave; what is done by then must be on disk. Never where no job
            listens to signals.
    """
    reasons = [request.asked(process) for request in _listening]
    for reason in filter(None, reasons):
        raise Requeue(f"{reason}: what is done so far is kept")


def _end_of_allocation() -> int | None:
    """Seconds since the epoch; None where nobody says."""
    text = os.environ.get(END_OF_ALLOCATION, "")
    return int(text) if text.isdigit() else None
