"""Packed batches for tests of losses, and an objective run over them in any split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from rl_megatron.interfaces.batch import PackedBatch
from rl_megatron.interfaces.objective import ModelOutput, Objective
from rl_megatron.losses import totals


def packed(masks: Sequence[Sequence[int]], paired: bool = False, **fields: Any) -> PackedBatch:
    """A batch of one sequence per mask, e.g. [[0, 1, 1], [0, 1]]; the tokens mean nothing."""
    flat = [bool(m) for mask in masks for m in mask]
    bounds = [0, *accumulate(len(mask) for mask in masks)]
    tensors = {
        name: value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float32)
        for name, value in fields.items()
    }
    return PackedBatch(
        tokens=torch.zeros(len(flat), dtype=torch.int64),
        cu_seqlens=torch.tensor(bounds),
        response_mask=torch.tensor(flat, dtype=torch.bool),
        sequence_ids=torch.arange(len(masks)),
        paired=paired,
        **tensors,
    )


def random_masks(seed: int, num_sequences: int, empty: Sequence[int] = ()) -> list[list[int]]:
    """Masks of unequal lengths, a prompt before each response; none at all in `empty` ones."""
    generator = torch.Generator().manual_seed(seed)
    masks = []
    for index in range(num_sequences):
        prompt, response = torch.randint(1, 7, (2,), generator=generator).tolist()
        masks.append([0] * prompt + [int(index not in empty)] * response)
    return masks


@dataclass
class Outcome:
    """What a mini-batch came to: sums (or maxima) over its micro-batches, and the gradients."""

    loss: float
    metrics: dict[str, float]
    gradient: Tensor
    entropy_gradient: Tensor | None


def run_objective(
    objective: Objective,
    batch: PackedBatch,
    logprobs: Tensor,
    parts: Sequence[Sequence[int]] | None = None,
    entropy: Tensor | None = None,
) -> Outcome:
    """The objective over the mini-batch, dealt to micro-batches of the given sequences."""
    batch = objective.weigh(batch)
    counts = totals(batch)
    leaf = logprobs.detach().clone().requires_grad_()
    entropy = torch.zeros_like(logprobs) if entropy is None else entropy.detach().clone()
    entropy.requires_grad_()
    loss, metrics = 0.0, {}
    for part in [range(batch.num_sequences)] if parts is None else parts:
        index = batch.token_index(part)
        output = objective.loss(
            ModelOutput(leaf[index], entropy[index]), batch.select(part), counts
        )
        output.loss.backward()
        assert not any(v.requires_grad for v in {**output.metrics, **output.maxima}.values())
        loss += output.loss.item()
        for name, value in output.metrics.items():
            metrics[name] = metrics.get(name, 0.0) + float(value)
        for name, value in output.maxima.items():
            metrics[name] = max(metrics.get(name, float("-inf")), float(value))
    assert leaf.grad is not None
    return Outcome(loss, metrics, leaf.grad, entropy.grad)
