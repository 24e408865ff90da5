"""Masks and sums that every loss is built from, in float64.

The per-token values of a micro-batch are nothing next to its hidden states, so they are worked on
in float64: how a batch is split then shows in the last digits of a float64 only.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from rl_megatron.interfaces.batch import PackedBatch


def segment_sum(
    values: Shaped[Tensor, " T"], cu_seqlens: Int[Tensor, " N_plus_1"]
) -> Float[Tensor, " N"]:
    """Sum of `values` over each sequence, float64; 0 for an empty sequence.

    Differentiable and deterministic: no atomic additions on any device.

    Args:
        values: Per-token numbers of any type, bool included.
        cu_seqlens: Boundaries of the sequences, from 0 to T.
    """
    sums: Tensor = torch.segment_reduce(values.double(), "sum", offsets=cu_seqlens)
    return sums


def zero_outside(mask: Bool[Tensor, " T"], values: Float[Tensor, " T"]) -> Float[Tensor, " T"]:
    """`values` in float64, exactly 0 outside the mask, whatever was there (NaN included).

    To be used before any arithmetic: masking a result is too late, because 0 * NaN is NaN, in the
    gradient too. The gradient outside the mask is exactly 0.
    """
    return torch.where(mask, values, 0.0).double()


def masked_sum(values: Float[Tensor, " T"], weights: Shaped[Tensor, " T"]) -> Float[Tensor, ""]:
    """Sum of weights * values in float64; a value of weight 0 counts as 0, even if not finite.

    Args:
        values: Per-token numbers.
        weights: Per-token weights, or a mask.
    """
    return (zero_outside(weights != 0, values) * weights.double()).sum()


def counted_tokens(batch: PackedBatch) -> Bool[Tensor, " T"]:
    """True on tokens that the loss counts: under the response mask, with a weight that is not 0."""
    assert batch.loss_weights is not None, "Objective.weigh comes before Objective.loss"
    return batch.response_mask & (batch.loss_weights != 0)


def counted_values(batch: PackedBatch, name: str) -> Float[Tensor, " T"]:
    """The batch's per-token field `name` in float64, 0 on tokens that are not counted."""
    values = getattr(batch, name)
    assert values is not None, f"this loss needs {name} in the batch"
    return zero_outside(counted_tokens(batch), values)
