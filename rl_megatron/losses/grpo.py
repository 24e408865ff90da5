"""Policy gradient with a clipped ratio: GRPO and its relatives."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rl_megatron.errors import ConfigError
from rl_megatron.interfaces import metric_names as names
from rl_megatron.interfaces.batch import PackedBatch
from rl_megatron.interfaces.objective import LossOutput, ModelOutput, Objective, Totals
from rl_megatron.losses.aggregate import aggregation_weights
from rl_megatron.losses.kl import KL_ESTIMATORS, MAX_LOG_RATIO, KLEstimator, k3
from rl_megatron.losses.sums import counted_tokens, counted_values, masked_sum, zero_outside


class PolicyLoss(NamedTuple):
    """Per-token policy loss and where it was clipped (there its gradient is exactly 0).

    Attributes:
        loss: The loss of each token.
        ratio: exp(logprobs - old_logprobs), before any clipping.
        clipped_low: A < 0 and the ratio below 1 - clip_ratio_low.
        clipped_high: A > 0 and the ratio above 1 + clip_ratio_high.
        clipped_dual: A < 0 and the ratio above clip_ratio_c.
    """

    loss: Float[Tensor, " T"]
    ratio: Float[Tensor, " T"]
    clipped_low: Bool[Tensor, " T"]
    clipped_high: Bool[Tensor, " T"]
    clipped_dual: Bool[Tensor, " T"]


def policy_loss(
    logprobs: Float[Tensor, " T"],
    old_logprobs: Float[Tensor, " T"],
    advantages: Float[Tensor, " T"],
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float | None,
) -> PolicyLoss:
    """max(-A * ratio, -A * clip(ratio, 1 - low, 1 + high)), and at most -A * c where A < 0.

    PPO (arXiv 1707.06347, eq. 7) with unequal bounds (DAPO, arXiv 2503.14476, eq. 10) and dual
    clip (arXiv 1912.09729, eq. 5; None = off). Written as -A times a bounded ratio, which is the
    same and leaves no ties between branches that would halve a gradient. The log-ratio is clamped
    to [-20, 20] so that exp stays finite; outside the gradient is 0.
    """
    log_ratio = (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    clipped_low = (advantages < 0) & (ratio < 1 - clip_ratio_low)
    clipped_high = (advantages > 0) & (ratio > 1 + clip_ratio_high)
    clipped_dual = torch.zeros_like(clipped_low)
    bounded = torch.where(clipped_low, 1 - clip_ratio_low, ratio)
    bounded = torch.where(clipped_high, 1 + clip_ratio_high, bounded)
    if clip_ratio_c is not None:
        clipped_dual = (advantages < 0) & (ratio > clip_ratio_c)
        bounded = torch.where(clipped_dual, clip_ratio_c, bounded)
    return PolicyLoss(-advantages * bounded, ratio, clipped_low, clipped_high, clipped_dual)


def grpo_objective(
    *,
    max_response_tokens: int,
    loss_agg_mode: str = "token-mean",
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float | None = 3.0,
    use_kl_loss: bool = False,
    kl_loss_coef: float = 0.001,
    kl_loss_type: KLEstimator = "k3",
    allow_k1_loss: bool = False,
) -> Objective:
    """The objective loss/policy + kl_loss_coef * loss/kl; other metrics are per token.

    The batch needs advantages and old_logprobs, and ref_logprobs if use_kl_loss; where it has
    ref_logprobs, the KL to the reference (k3) is a metric.

    Raises:
        ConfigError: k1 is to be a loss, whose expected gradient is zero, without allow_k1_loss.
    """
    if use_kl_loss and kl_loss_type == "k1" and not allow_k1_loss:
        raise ConfigError(
            "loss.kl_loss_type: 'k1' as a loss has an expected gradient of zero, so it would not "
            "hold the policy to the reference; use 'k2' (exact gradient) or 'k3', or set "
            "loss.allow_k1_loss=true if that is what you want"
        )

    def weigh(batch: PackedBatch) -> PackedBatch:
        weights = aggregation_weights(
            batch.cu_seqlens, batch.response_mask, loss_agg_mode, max_response_tokens
        )
        return batch.with_fields(loss_weights=weights)

    def loss(output: ModelOutput, batch: PackedBatch, totals: Totals) -> LossOutput:
        logprobs = zero_outside(counted_tokens(batch), output.logprobs)
        weights = counted_values(batch, "loss_weights")
        policy = policy_loss(
            logprobs,
            counted_values(batch, "old_logprobs"),
            counted_values(batch, "advantages"),
            clip_ratio_low,
            clip_ratio_high,
            clip_ratio_c,
        )
        loss = masked_sum(policy.loss, weights)
        metrics = {names.LOSS_POLICY: loss} | _policy_metrics(policy, output, batch, totals)
        if use_kl_loss:
            r = counted_values(batch, "ref_logprobs") - logprobs
            kl = masked_sum(KL_ESTIMATORS[kl_loss_type](r), weights)
            loss = loss + kl_loss_coef * kl
            metrics[names.LOSS_KL] = kl
        # Ratios are positive, so 0 is the maximum over no token at all.
        ratios = zero_outside(counted_tokens(batch), policy.ratio.detach())
        ratio_max = torch.cat([ratios, ratios.new_zeros(1)]).max()
        return LossOutput(
            loss=loss,
            metrics={name: value.detach() for name, value in metrics.items()},
            maxima={names.POLICY_RATIO_MAX: ratio_max},
        )

    return Objective(name="grpo", weigh=weigh, loss=loss)


def _policy_metrics(
    policy: PolicyLoss, output: ModelOutput, batch: PackedBatch, totals: Totals
) -> dict[str, Float[Tensor, ""]]:
    """Shares of the per-token means."""
    counted = counted_tokens(batch)
    logprobs = zero_outside(counted, output.logprobs).detach()
    per_token = {
        names.POLICY_CLIP_FRACTION_LOW: policy.clipped_low.double(),
        names.POLICY_CLIP_FRACTION_HIGH: policy.clipped_high.double(),
        names.POLICY_CLIP_FRACTION_DUAL: policy.clipped_dual.double(),
        names.POLICY_RATIO_MEAN: policy.ratio,
        # Sampled from the old policy, so this estimates KL(old || now).
        names.POLICY_APPROX_KL: k3(logprobs - counted_values(batch, "old_logprobs")),
        names.POLICY_ENTROPY: output.entropy,
    }
    if batch.ref_logprobs is not None:
        per_token[names.POLICY_KL_TO_REFERENCE] = k3(
            counted_values(batch, "ref_logprobs") - logprobs
        )
    return {
        name: masked_sum(values, counted) / max(totals.num_tokens, 1)
        for name, values in per_token.items()
    }
