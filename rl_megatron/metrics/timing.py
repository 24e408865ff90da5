"""Where the time of a step goes: one span per verb of the loop."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass
class Span:
    """One stretch of a phase. Set `tokens` inside it where a rate is wanted."""

    tokens: int = 0


class PhaseTimer:
    """Seconds and tokens of the phases of a step, summed until they are collected.

    The phases of the recipes: generate, score, old_logprobs, ref_logprobs, update, evaluate, save.

    Args:
        clock: Seconds that only go up.

    Example:
        with timer.phase("generate") as span:
            rollouts = engine.generate(...)
            span.tokens = sum(len(rollout.response_ids) for rollout in rollouts)
        metrics |= timer.collect()
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = defaultdict(float)
        self._tokens: dict[str, int] = defaultdict(int)
        self._since = clock()

    @contextmanager
    def phase(self, name: str) -> Iterator[Span]:
        """A span of the phase `name`; a phase may have several in one step."""
        span = Span()
        _finish_gpu_work()
        start = self._clock()
        yield span
        _finish_gpu_work()
        self._seconds[name] += self._clock() - start
        self._tokens[name] += span.tokens

    def collect(self) -> dict[str, float]:
        """`time/<phase>_seconds` and `time/<phase>_tokens_per_second` since the last collection.

        A rate is there only for phases that counted tokens; tokens are of all ranks together if
        they were counted so. `time/step_seconds` is the wall time of it all, pauses included.
        """
        now = self._clock()
        metrics = {"time/step_seconds": now - self._since}
        for name, seconds in self._seconds.items():
            metrics[f"time/{name}_seconds"] = seconds
            if self._tokens[name] and seconds > 0:
                metrics[f"time/{name}_tokens_per_second"] = self._tokens[name] / seconds
        self._since = now
        self._seconds.clear()
        self._tokens.clear()
        return metrics


def _finish_gpu_work() -> None:
    # Kernels are queued: without this, their time is booked on whoever waits for them next.
    if torch.cuda.is_available():
        torch.cuda.synchronize()
