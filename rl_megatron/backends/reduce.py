"""From the shares of micro-batches and ranks to the metrics of the mini-batch."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from rl_megatron.errors import NumericsError
from rl_megatron.interfaces import metric_names as names
from rl_megatron.interfaces.batch import PackedBatch
from rl_megatron.parallel.process import Process


class MetricReducer:
    """Adds up shares, takes maxima, over all ranks, in two small collectives a step.

    Ranks before the last pipeline stage do not know the metric names; the last rank tells them,
    once per objective.
    """

    def __init__(self, process: Process) -> None:
        self._process = process
        self._names: dict[str, tuple[list[str], list[str]]] = {}

    def reduce(
        self, objective: str, outputs: list[dict[str, Any]], speaks: bool = True
    ) -> dict[str, float]:
        """The metrics of the mini-batch, equal on all ranks.

        Args:
            objective: Its name; the same objective always has the same metrics.
            outputs: {"shares": {name: scalar}, "maxima": {name: scalar}} per micro-batch of this
                rank; empty before the last pipeline stage.
            speaks: Whether this rank's numbers count: one rank per tensor-parallel group.
        """
        shares, maxima = self._metric_names(objective, outputs)
        sums = torch.zeros(len(shares), dtype=torch.float64)
        peaks = torch.full((len(maxima),), -math.inf, dtype=torch.float64)
        for output in outputs if speaks else []:
            sums += torch.stack([output["shares"][n].double() for n in shares]).cpu()
            if maxima:
                values = torch.stack([output["maxima"][n].double() for n in maxima]).cpu()
                peaks = torch.maximum(peaks, values)
        sums = self._process.all_reduce(sums)
        if maxima:
            peaks = self._process.all_reduce(peaks, op=dist.ReduceOp.MAX)
        return dict(zip(shares, sums.tolist(), strict=True)) | dict(
            zip(maxima, peaks.tolist(), strict=True)
        )

    def _metric_names(
        self, objective: str, outputs: list[dict[str, Any]]
    ) -> tuple[list[str], list[str]]:
        if objective not in self._names:
            names: list[Any] = [None]
            if outputs:
                names = [(list(outputs[0]["shares"]), list(outputs[0]["maxima"]))]
            world_size = self._process.layout.world_size
            if world_size > 1:
                dist.broadcast_object_list(names, src=world_size - 1)
            self._names[objective] = names[0]
        return self._names[objective]


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
