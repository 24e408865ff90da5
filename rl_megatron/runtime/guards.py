"""Identities that hold before the first update. If one does not, every later number is wrong."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rl_megatron.config.preference_runs import DPORun, KTORun, ReferencedRun
from rl_megatron.config.runs import GRPORun
from rl_megatron.errors import NumericsError
from rl_megatron.interfaces import metric_names as names
from rl_megatron.losses.preference import ImplicitRewards, pair_loss

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
    """Raise NumericsError unless an equal reference gave margin 0 and its loss: ln 2 for DPO."""
    if run.loss.is_reference_free or not _reference_is_start(run):
        return
    if metrics[names.OPTIMIZER_SKIPPED]:
        return
    loss = run.loss
    no_margin = torch.zeros(1, dtype=torch.float64)
    formula = pair_loss(loss.loss_type, loss.beta, loss.label_smoothing)
    expected = float(formula(ImplicitRewards(no_margin, no_margin)))
    _check(
        metrics,
        {names.REWARDS_MARGINS: 0.0, names.LOSS_DPO: expected},
        _TOLERANCE[run.model.dtype],
        "policy and reference are the same model. Look for dropout, log-probs of other rows, or a "
        "layout whose ranks hold other weights",
    )


def check_first_kto_step(run: KTORun, metrics: Mapping[str, float]) -> None:
    """Raise NumericsError unless an equal reference gave rewards of 0 and a KL of 0."""
    if not _reference_is_start(run) or metrics[names.OPTIMIZER_SKIPPED]:
        return
    zero = (names.REWARDS_CHOSEN, names.REWARDS_REJECTED, names.KL)
    _check(
        metrics,
        {name: 0.0 for name in zero if name in metrics},
        _TOLERANCE[run.model.dtype],
        "policy and reference are the same model. Look for dropout, log-probs of other rows, or a "
        "layout whose ranks hold other weights",
    )


def _reference_is_start(run: ReferencedRun | GRPORun) -> bool:
    return run.reference.path in (None, run.model.path)


def _check(
    metrics: Mapping[str, float], expected: Mapping[str, float], tolerance: float, why: str
) -> None:
    for name, value in expected.items():
        if not abs(metrics[name] - value) <= tolerance * max(1.0, abs(value)):
            raise NumericsError(
                f"{name} is {metrics[name]} in the first step and must be {value:.6g} (within "
                f"{tolerance}): {why}. The run stops before it trains on wrong numbers."
            )
