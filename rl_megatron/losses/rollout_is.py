"""Importance weights between the engine that sampled and the trainer that learns.

An engine with other kernels, or another precision, samples from a slightly different distribution
than the one the trainer differentiates. The weight old / rollout probability makes up for it.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rl_megatron.errors import ConfigError
from rl_megatron.interfaces import metric_names as names
from rl_megatron.interfaces.batch import PackedBatch
from rl_megatron.losses.kl import MAX_LOG_RATIO
from rl_megatron.losses.sums import segment_sum, zero_outside

ROLLOUT_IS = ("none", "truncate", "mask")
ROLLOUT_IS_LEVELS = ("token", "sequence")


def importance_weights(
    old_logprobs: Float[Tensor, " T"],
    rollout_logprobs: Float[Tensor, " T"],
    response_mask: Bool[Tensor, " T"],
) -> Float[Tensor, " T"]:
    """exp(old_logprobs - rollout_logprobs) of each token, float64; 1 outside the mask.

    The log is clamped to [-20, 20] so that exp stays finite.
    """
    difference = zero_outside(response_mask, old_logprobs) - zero_outside(
        response_mask, rollout_logprobs
    )
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def sequence_importance_weights(
    old_logprobs: Float[Tensor, " T"],
    rollout_logprobs: Float[Tensor, " T"],
    response_mask: Bool[Tensor, " T"],
    cu_seqlens: Int[Tensor, " N_plus_1"],
) -> Float[Tensor, " N"]:
    """exp(sum over the response of old_logprobs - rollout_logprobs), float64.

    The exact weight of a response: the product of its tokens' weights, not their mean. The sum is
    clamped to [-20, 20].
    """
    difference = zero_outside(response_mask, old_logprobs) - zero_outside(
        response_mask, rollout_logprobs
    )
    return segment_sum(difference, cu_seqlens).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def bounded_weights(
    weights: Float[Tensor, " N"], rollout_is: str, rollout_is_threshold: float
) -> Float[Tensor, " N"]:
    """min(w, C) (truncate), or w inside [1 / C, C] and 0 outside (mask), with C the threshold.

    truncate is truncated importance sampling (Ionides, 2008), mask the rule of IcePop (Ring-1T).
    """
    if rollout_is == "truncate":
        return weights.clamp(max=rollout_is_threshold)
    inside = (weights >= 1 / rollout_is_threshold) & (weights <= rollout_is_threshold)
    return torch.where(inside, weights, 0.0)


def correct_for_rollout(
    batch: PackedBatch,
    *,
    rollout_is: str = "none",
    rollout_is_level: str = "token",
    rollout_is_threshold: float = 2.0,
) -> tuple[PackedBatch, dict[str, float]]:
    """The batch with advantages times importance weights, and metrics of the weights.

    Every policy loss is -A times something, so a weight on the advantage is a weight on the loss
    of that token, without gradient. KL and entropy terms are not weighted. A token of weight 0
    still counts in the denominators of the aggregation.

    Args:
        batch: A whole rollout batch with advantages, old_logprobs and rollout_logprobs.
        rollout_is: One of ROLLOUT_IS; none: the batch as it is, and no metric.
        rollout_is_level: token: each its own weight. sequence: all those of a response the weight
            of the response.
        rollout_is_threshold: Bound of the weights, above 1.

    Raises:
        ConfigError: A mode or level is unknown.
    """
    _check("rollout_is", rollout_is, ROLLOUT_IS)
    _check("rollout_is_level", rollout_is_level, ROLLOUT_IS_LEVELS)
    if rollout_is == "none":
        return batch, {}
    assert batch.advantages is not None, "advantages come before their weights"
    assert batch.old_logprobs is not None and batch.rollout_logprobs is not None
    mask = batch.response_mask
    if rollout_is_level == "token":
        raw = importance_weights(batch.old_logprobs, batch.rollout_logprobs, mask)
        units = mask
    else:
        raw = sequence_importance_weights(
            batch.old_logprobs, batch.rollout_logprobs, mask, batch.cu_seqlens
        )
        units = segment_sum(mask, batch.cu_seqlens) > 0
    used = bounded_weights(raw, rollout_is, rollout_is_threshold)
    per_token = used if rollout_is_level == "token" else used[batch.segment_ids]
    advantages = torch.where(mask, batch.advantages * per_token, 0.0)
    weighted = batch.with_fields(advantages=advantages.to(batch.advantages.dtype))
    return weighted, _metrics(raw[units], used[units])


def _metrics(raw: Float[Tensor, " n"], used: Float[Tensor, " n"]) -> dict[str, float]:
    """All 0 where there is no weight, and the effective fraction where all are masked."""
    n = max(raw.numel(), 1)
    squares = n * float(used.square().sum())
    return {
        names.ROLLOUT_IS_MEAN: float(raw.sum()) / n,
        names.ROLLOUT_IS_MAX: float(torch.cat([raw, raw.new_zeros(1)]).max()),
        names.ROLLOUT_IS_BOUNDED: float((used != raw).sum()) / n,
        names.ROLLOUT_IS_EFFECTIVE: float(used.sum()) ** 2 / squares if squares else 0.0,
    }


def _check(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"algorithm.{name}: {value!r} is unknown; use one of {', '.join(known)}")
