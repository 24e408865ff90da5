"""How far a run is and how it is doing: a bar on a terminal, plain log lines elsewhere."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from rl_megatron import log

logger = logging.getLogger(__name__)


class RunProgress:
    """Shows the steps of a run on rank 0, in a `with` block; silent on other ranks.

    Args:
        title: What is running, e.g. "grpo".
        total_steps: Steps of the whole run.
        rank: This process among all of the run.
        shown: Label to metric name, e.g. {"reward": "rewards/mean"}; a metric that a step does
            not have is left out.
        first_step: Steps that were done before this attempt.
        log_interval: Steps between two log lines where there is no terminal.
        clock: Seconds that only go up.
    """

    def __init__(
        self,
        title: str,
        total_steps: int,
        rank: int,
        shown: Mapping[str, str],
        *,
        first_step: int = 0,
        log_interval: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._title = title
        self._total_steps = total_steps
        self._shown = shown
        self._first_step = first_step
        self._log_interval = log_interval
        self._clock = clock
        self._start = clock()
        self._silent = rank != 0
        self._bar: Progress | None = None
        if rank == 0 and log.console().is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[numbers]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=log.console(),
            )
            self._task = self._bar.add_task(
                title, total=total_steps, completed=first_step, numbers=""
            )

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show that `step` steps are done, and the latest numbers."""
        if self._silent:
            return
        numbers = "  ".join(
            f"{label} {metrics[name]:.4g}" for label, name in self._shown.items() if name in metrics
        )
        if self._bar is not None:
            self._bar.update(self._task, completed=step, numbers=numbers)
        elif step % self._log_interval == 0 or step == self._total_steps:
            logger.info(
                "%s %d/%d  %s  %s left",
                self._title,
                step,
                self._total_steps,
                numbers,
                _duration(self._seconds_left(step)),
            )

    def _seconds_left(self, step: int) -> float:
        done = max(step - self._first_step, 1)
        return (self._clock() - self._start) / done * (self._total_steps - step)


def _duration(seconds: float) -> str:
    """Hours, minutes and seconds, e.g. "1:02:03"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
