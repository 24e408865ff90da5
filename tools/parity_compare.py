"""How far two steps are from each other, and how far they may be."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_megatron.interfaces.metric_names import LOSS_TOTAL

Result = tuple[dict[str, float], dict[str, Tensor]]
"""Metrics of a step, and its gradient under Hugging Face names."""

# Numbers below it are compared as if they were as large, so that 0 can be compared.
METRIC_FLOOR = 1e-3


@dataclass(frozen=True)
class Bounds:
    """What a difference may be.

    Attributes:
        gradient: Of each parameter's gradient, relative to its norm.
        metric: Of the loss and every metric, relative.
    """

    gradient: float
    metric: float


BOUNDS = {
    torch.float32: Bounds(2e-5, 1e-6),
    # A split rounds in other places. Both it and one rank are as far from the float32 result of the
    # same weights as bf16 makes them, so from each other they are twice as far at most. What bf16
    # makes of the gradients on one rank is 0.046, with experts 0.042 (tools/parity.py prints it),
    # of the metrics 0.01; the largest ratio, which hangs on one token, is off by up to 0.016.
    torch.bfloat16: Bounds(0.1, 0.03),
}


@dataclass(frozen=True)
class Difference:
    """How far a step is from the reference: the worst of each kind, and where it is.

    Attributes:
        gradient: Norm of the difference over that of the gradient, of one parameter.
        parameter: Its name.
        loss: Relative difference of the loss.
        metric: Relative difference of another metric.
        metric_name: Its name.
    """

    gradient: float
    parameter: str
    loss: float
    metric: float
    metric_name: str

    def within(self, bounds: Bounds) -> bool:
        """False for NaN too."""
        return self.gradient <= bounds.gradient and max(self.loss, self.metric) <= bounds.metric


def compare(found: Result, expected: Result) -> Difference:
    """The difference of two results; names that one of them lacks are infinitely far off."""
    metrics = {
        name: _relative(found[0].get(name, math.inf), expected[0].get(name, math.inf))
        for name in found[0] | expected[0]
    }
    loss = metrics.pop(LOSS_TOTAL)
    gradients = {
        name: _gradient_difference(found[1].get(name), expected[1].get(name))
        for name in found[1] | expected[1]
    }
    metric_name, parameter = (
        max(metrics, key=metrics.__getitem__),
        max(gradients, key=gradients.__getitem__),
    )
    return Difference(gradients[parameter], parameter, loss, metrics[metric_name], metric_name)


def _relative(found: float, expected: float) -> float:
    difference = abs(found - expected) / max(abs(expected), METRIC_FLOOR)
    return difference if math.isfinite(difference) else math.inf


def _gradient_difference(found: Tensor | None, expected: Tensor | None) -> float:
    if found is None or expected is None or found.shape != expected.shape:
        return math.inf
    difference = float((found.double() - expected.double()).norm())
    if difference == 0:
        return 0.0
    relative = difference / max(float(expected.double().norm()), sys.float_info.min)
    return relative if math.isfinite(relative) else math.inf


def check_reference(results: Mapping[str, Result]) -> None:
    """Raises ValueError naming a case that has no loss or no gradient: all that is 0 is equal."""
    for name, (metrics, gradients) in results.items():
        if not metrics[LOSS_TOTAL] or not any(bool(value.any()) for value in gradients.values()):
            raise ValueError(
                f"{name}: loss {metrics[LOSS_TOTAL]}, and a gradient of 0 or of nothing; comparing "
                "with it proves nothing. Change the batch in tools/parity_cases.py"
            )
