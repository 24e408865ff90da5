"""Policy gradient per token: how the ratio of new to old probability is taken, and bounded."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rl_megatron.losses.kl import MAX_LOG_RATIO
from rl_megatron.losses.sums import segment_sum, zero_outside


class PolicyLoss(NamedTuple):
    """Per-token policy loss and where its ratio was bounded.

    Attributes:
        loss: The loss of each token.
        ratio: Of new to old probability, before any bound.
        clipped_low: The ratio was raised to 1 - clip_ratio_low.
        clipped_high: The ratio was lowered to 1 + clip_ratio_high.
        clipped_dual: The ratio was lowered to clip_ratio_c.
    """

    loss: Float[Tensor, " T"]
    ratio: Float[Tensor, " T"]
    clipped_low: Bool[Tensor, " T"]
    clipped_high: Bool[Tensor, " T"]
    clipped_dual: Bool[Tensor, " T"]


def token_ratio(
    logprobs: Float[Tensor, " T"], old_logprobs: Float[Tensor, " T"]
) -> Float[Tensor, " T"]:
    """exp(logprobs - old_logprobs) of each token.

    The log-ratio is clamped to [-20, 20] so that exp stays finite; outside the gradient is 0.
    """
    return (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def sequence_ratio(
    logprobs: Float[Tensor, " T"],
    old_logprobs: Float[Tensor, " T"],
    counted: Bool[Tensor, " T"],
    cu_seqlens: Int[Tensor, " N_plus_1"],
) -> Float[Tensor, " T"]:
    """exp(mean log-ratio over the counted tokens of its sequence), on each token of a sequence.

    The length-normalised likelihood ratio of GSPO (arXiv 2507.18071, eq. 7). With gradient: that
    of each token's log-prob is the ratio over the number of tokens. The mean is clamped to
    [-20, 20], and 0 where no token is counted.
    """
    log_ratio = zero_outside(counted, logprobs - old_logprobs)
    num_tokens = segment_sum(counted, cu_seqlens).clamp(min=1)
    mean = segment_sum(log_ratio, cu_seqlens) / num_tokens
    ratio = mean.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    index = torch.arange(ratio.shape[0], device=ratio.device)
    return ratio[torch.repeat_interleave(index, cu_seqlens[1:] - cu_seqlens[:-1])]


def clipped_ratio_loss(
    ratio: Float[Tensor, " T"],
    advantages: Float[Tensor, " T"],
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float | None,
) -> PolicyLoss:
    """max(-A * ratio, -A * clip(ratio, 1 - low, 1 + high)), and at most -A * c where A < 0.

    PPO (arXiv 1707.06347, eq. 7) with unequal bounds (DAPO, arXiv 2503.14476, eq. 10) and dual
    clip (arXiv 1912.09729, eq. 5; None = off). Written as -A times a bounded ratio, which is the
    same and leaves no ties between branches that would halve a gradient. The gradient of a
    bounded ratio is exactly 0.
    """
    clipped_low = (advantages < 0) & (ratio < 1 - clip_ratio_low)
    clipped_high = (advantages > 0) & (ratio > 1 + clip_ratio_high)
    clipped_dual = torch.zeros_like(clipped_low)
    bounded = torch.where(clipped_low, 1 - clip_ratio_low, ratio)
    bounded = torch.where(clipped_high, 1 + clip_ratio_high, bounded)
    if clip_ratio_c is not None:
        clipped_dual = (advantages < 0) & (ratio > clip_ratio_c)
        bounded = torch.where(clipped_dual, clip_ratio_c, bounded)
    return PolicyLoss(-advantages * bounded, ratio, clipped_low, clipped_high, clipped_dual)


def clipped_weight_loss(
    logprobs: Float[Tensor, " T"],
    ratio: Float[Tensor, " T"],
    advantages: Float[Tensor, " T"],
    clip_ratio_low: float,
    clip_ratio_high: float,
) -> PolicyLoss:
    """-A * w * logprobs, the weight w = clip(ratio, 1 - low, 1 + high) without gradient.

    CISPO (arXiv 2506.13585, eq. 4 and 5). A bound changes how much a token weighs and never takes
    its gradient away, which is -A * w; both signs of A are bounded on both sides. The value of
    this loss says little: its gradient is what is meant.
    """
    ratio = ratio.detach()
    clipped_low, clipped_high = ratio < 1 - clip_ratio_low, ratio > 1 + clip_ratio_high
    weight = ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    return PolicyLoss(
        -advantages * weight * logprobs,
        ratio,
        clipped_low,
        clipped_high,
        clipped_dual=torch.zeros_like(clipped_low),
    )
