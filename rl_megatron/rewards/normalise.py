"""Scores of a reward model brought to a scale that other rewards can be added to.

Nothing is carried from batch to batch: the reward of a response does not depend on what was sampled
before it, and a resumed run has no state to lose.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

Values = Sequence[float | None]
Normaliser = Callable[[Values], list[float | None]]


def fixed(mean: float, std: float) -> Normaliser:
    """(value - mean) / std, with numbers known before the run; std is above 0."""
    return lambda values: [None if value is None else (value - mean) / std for value in values]


def batch(values: Values) -> list[float | None]:
    """The same with mean and unbiased standard deviation of the values; all 0 where all are equal.

    A value that is None stays None, and is no part of them.
    """
    scored = [value for value in values if value is not None]
    std = statistics.stdev(scored) if len(scored) > 1 else 0.0
    if std == 0:
        return [None if value is None else 0.0 for value in values]
    return fixed(statistics.fmean(scored), std)(values)
