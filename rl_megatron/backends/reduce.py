"""From the shares of micro-batches and ranks to the metrics of the mini-batch."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl_megatron.errors import NumericsError
from rl_megatron.interfaces import metric_names as names
from rl_megatron.interfaces.batch import PackedBatch
from rl_megatron.parallel.process import Process


def reduce_metrics(
    process: Process, outputs: list[dict[str, Any]], speaks: bool = True
) -> dict[str, float]:
    """The metrics of the mini-batch, equal on all ranks: shares add up, of maxima the largest.

    Args:
        process: This rank.
        outputs: {"shares": {name: scalar}, "maxima": {name: scalar}} per micro-batch of this
            rank; empty before the last pipeline stage.
        speaks: Whether this rank's numbers count: one of those that computed them.
    """
    shares, maxima = _metric_names(process, outputs)
    sums = torch.zeros(len(shares), dtype=torch.float64)
    peaks = torch.full((len(maxima),), -math.inf, dtype=torch.float64)
    for output in outputs if speaks else []:
        sums += torch.stack([output["shares"][n].double() for n in shares]).cpu()
        if maxima:
            values = torch.stack([output["maxima"][n].double() for n in maxima]).cpu()
            peaks = torch.maximum(peaks, values)
    sums = process.all_reduce(sums)
    if maxima:
        peaks = process.all_reduce(peaks, op=dist.ReduceOp.MAX)
    return dict(zip(shares, sums.tolist(), strict=True)) | dict(
        zip(maxima, peaks.tolist(), strict=True)
    )


def _metric_names(process: Process, outputs: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """What is to be reduced. The last rank is always on the last stage, and tells those before."""
    known: list[Any] = [None]
    if outputs:
        known = [(list(outputs[0]["shares"]), list(outputs[0]["maxima"]))]
    if process.layout.pipeline > 1:
        dist.broadcast_object_list(known, src=process.layout.world_size - 1)
    shares, maxima = known[0]
    return shares, maxima


def with_balance(
    process: Process, metrics: dict[str, float], share: Tensor, coefficient: float
) -> dict[str, float]:
    """The metrics with the balance loss of experts in them, and in the total.

    Args:
        process: This rank.
        metrics: Of the mini-batch.
        share: Scalar; the balance of this rank's layers and tokens, which no other rank counts.
        coefficient: Its factor in the loss.
    """
    balance = float(process.all_reduce(share))
    total = metrics[names.LOSS_TOTAL] + coefficient * balance
    return metrics | {names.LOSS_TOTAL: total, names.LOSS_MOE_BALANCE: balance}


def check_finite(metrics: dict[str, float], grad_norm: float) -> None:
    """Raise NumericsError, before anything is changed, where the loss or gradient is not finite."""
    loss = metrics[names.LOSS_TOTAL]
    if math.isfinite(loss) and math.isfinite(grad_norm):
        return
    bad = sorted(name for name, value in metrics.items() if not math.isfinite(value))
    raise NumericsError(
        f"the loss is {loss} and the gradient norm {grad_norm}: the step was not taken and the "
        f"weights are as before. Metrics that are not finite: {bad or 'none'}. Look at the batch "
        "in rollouts.jsonl; lower optimizer.lr or optimizer.clip_grad."
    )


def counts_nothing(batch: PackedBatch) -> bool:
    """Whether no token of the weighed mini-batch counts: an update would be momentum alone."""
    assert batch.loss_weights is not None, "the objective has not weighed the batch"
    return not bool((batch.loss_weights != 0).any())


def step_metrics(grad_norm: float, lr: float, skipped: bool) -> dict[str, float]:
    """What is told of the optimizer; the norm is the one before clipping."""
    return {
        names.OPTIMIZER_GRAD_NORM: grad_norm,
        names.OPTIMIZER_LR: lr,
        names.OPTIMIZER_SKIPPED: float(skipped),
    }
