"""Identities that hold before the first update. If one does not, every later number is wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rl_megatron.config.runs import DPORun, GRPORun
from rl_megatron.errors import NumericsError
from rl_megatron.interfaces import metric_names as names

# Policy and reference run the same forward passes; bf16 passes of other shapes differ in rounding.
_TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}


def check_first_grpo_step(run: GRPORun, metrics: Mapping[str, float]) -> None:
    """Raise NumericsError unless the first step saw ratio 1, and KL 0 to an equal reference."""
    expected = {names.POLICY_RATIO_MEAN: 1.0}
    if run.needs_reference and _reference_is_start(run):
        expected[names.POLICY_KL_TO_REFERENCE] = 0.0
    if metrics[names.OPTIMIZER_SKIPPED]:
        return
    _check(
        metrics,
        expected,
        _TOLERANCE[run.model.dtype],
        "the policy has not changed since its old log-probs were taken. Look for dropout, a "
        "temperature that is not applied in all passes, or a layout whose ranks hold other weights",
    )


def check_first_dpo_step(run: DPORun, metrics: Mapping[str, float]) -> None:
    """Raise NumericsError unless an equal reference gave margin 0 and loss ln 2."""
    if not _reference_is_start(run) or metrics[names.OPTIMIZER_SKIPPED]:
        return
    _check(
        metrics,
        {names.REWARDS_MARGINS: 0.0, names.LOSS_DPO: math.log(2)},
        _TOLERANCE[run.model.dtype],
        "policy and reference are the same model. Look for dropout, log-probs of other rows, or a "
        "layout whose ranks hold other weights",
    )


def _reference_is_start(run: DPORun | GRPORun) -> bool:
    return run.reference.path in (None, run.model.path)


def _check(
    metrics: Mapping[str, float], expected: Mapping[str, float], tolerance: float, why: str
) -> None:
    for name, value in expected.items():
        if not abs(metrics[name] - value) <= tolerance:
            raise NumericsError(
                f"{name} is {metrics[name]} in the first step and must be {value:.6g} (within "
                f"{tolerance}): {why}. The run stops before it trains on wrong numbers."
            )
