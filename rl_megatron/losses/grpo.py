"""Policy gradient with a clipped ratio: GRPO and its relatives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor

from rl_megatron.config.loss import LossMode
from rl_megatron.errors import ConfigError
from rl_megatron.interfaces import metric_names as names
from rl_megatron.interfaces.batch import PackedBatch
from rl_megatron.interfaces.objective import LossOutput, ModelOutput, Objective, Totals
from rl_megatron.kernels.choose import loss_kernel_on
from rl_megatron.losses.aggregate import aggregation_weights
from rl_megatron.losses.kl import KL_ESTIMATORS, KLEstimator, k3
from rl_megatron.losses.policy import (
    PolicyLoss,
    clipped_ratio_loss,
    clipped_weight_loss,
    sequence_ratio,
    token_ratio,
)
from rl_megatron.losses.sums import counted_tokens, counted_values, masked_sum, zero_outside

LOSS_MODES = ("vanilla", "gspo", "cispo")


@dataclass(frozen=True)
class _Numbers:
    """What `grpo_objective` binds; a KL estimator only where it is a term of the loss."""

    loss_mode: LossMode
    clip_ratio_low: float
    clip_ratio_high: float
    clip_ratio_c: float | None
    kl_loss_type: KLEstimator | None
    kl_loss_coef: float
    entropy_coef: float


def grpo_objective(
    *,
    max_response_tokens: int,
    loss_mode: str = "vanilla",
    loss_agg_mode: str = "token-mean",
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float | None = 3.0,
    use_kl_loss: bool = False,
    kl_loss_coef: float = 0.001,
    kl_loss_type: KLEstimator = "k3",
    allow_k1_loss: bool = False,
    entropy_coef: float = 0.0,
    implementation: str = "auto",
) -> Objective:
    """The objective loss/policy + kl_loss_coef * loss/kl - entropy_coef * loss/entropy.

    All three are aggregated alike; other metrics are per token. The policy loss is, by `loss_mode`:

    - vanilla: each token's ratio, clipped (PPO, GRPO, DAPO)
    - gspo: the ratio of the whole response, clipped. It is on each of its tokens, so that
      seq-mean-token-mean is the paper's mean over responses
    - cispo: log-probs weighted by each token's clipped ratio; clip_ratio_c has no effect

    The batch needs advantages and old_logprobs, and ref_logprobs if use_kl_loss; where it has
    ref_logprobs, the KL to the reference (k3) is a metric. Sequences of a micro-batch are whole.
    `implementation` is `kernels.losses`: on a GPU a kernel of the same numbers.

    Raises:
        ConfigError: The mode is unknown, or k1 is to be a loss, whose expected gradient is zero,
            without allow_k1_loss.
    """
    if loss_mode not in LOSS_MODES:
        known = ", ".join(LOSS_MODES)
        raise ConfigError(f"loss.loss_mode: {loss_mode!r} is unknown; use one of {known}")
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

    numbers = _Numbers(
        loss_mode=cast(LossMode, loss_mode),
        clip_ratio_low=clip_ratio_low,
        clip_ratio_high=clip_ratio_high,
        clip_ratio_c=clip_ratio_c,
        kl_loss_type=kl_loss_type if use_kl_loss else None,
        kl_loss_coef=kl_loss_coef,
        entropy_coef=entropy_coef,
    )

    def loss(output: ModelOutput, batch: PackedBatch, totals: Totals) -> LossOutput:
        by_kernel = loss_kernel_on(output.logprobs.device, implementation)
        return (_by_kernel if by_kernel else _by_torch)(numbers, output, batch, totals)

    return Objective(name="grpo", weigh=weigh, loss=loss, token_local=loss_mode != "gspo")


def _by_torch(
    numbers: _Numbers, output: ModelOutput, batch: PackedBatch, totals: Totals
) -> LossOutput:
    """The definition, differentiated by autograd."""
    counted = counted_tokens(batch)
    weights = counted_values(batch, "loss_weights")
    logprobs = zero_outside(counted, output.logprobs)
    policy = _policy_loss(numbers, logprobs, batch)
    loss = masked_sum(policy.loss, weights)
    metrics = {names.LOSS_POLICY: loss} | _policy_metrics(policy, output, batch, totals)
    if numbers.kl_loss_type is not None:
        r = counted_values(batch, "ref_logprobs") - logprobs
        kl = masked_sum(KL_ESTIMATORS[numbers.kl_loss_type](r), weights)
        loss = loss + numbers.kl_loss_coef * kl
        metrics[names.LOSS_KL] = kl
    if numbers.entropy_coef:
        entropy = masked_sum(output.entropy, weights)
        loss = loss - numbers.entropy_coef * entropy
        metrics[names.LOSS_ENTROPY] = entropy
    # Ratios are positive, so 0 is the maximum over no token at all.
    ratios = zero_outside(counted, policy.ratio.detach())
    ratio_max = torch.cat([ratios, ratios.new_zeros(1)]).max()
    return LossOutput(
        loss=loss,
        metrics={name: value.detach() for name, value in metrics.items()},
        maxima={names.POLICY_RATIO_MAX: ratio_max},
    )


def _by_kernel(
    numbers: _Numbers, output: ModelOutput, batch: PackedBatch, totals: Totals
) -> LossOutput:
    """The same from a kernel, gradient included."""
    from rl_megatron.kernels.policy_loss import PolicyLossSettings, policy_loss

    assert batch.old_logprobs is not None, "this loss needs old_logprobs in the batch"
    assert batch.advantages is not None, "this loss needs advantages in the batch"
    assert batch.loss_weights is not None, "Objective.weigh comes before Objective.loss"
    result = policy_loss(
        PolicyLossSettings(**vars(numbers)),
        output.logprobs,
        output.entropy,
        batch.old_logprobs,
        batch.advantages,
        batch.loss_weights,
        batch.ref_logprobs,
        batch.cu_seqlens,
        1 / max(totals.num_tokens, 1),
    )
    return LossOutput(result.loss, result.metrics, {names.POLICY_RATIO_MAX: result.ratio_max})


def _policy_loss(
    numbers: _Numbers, logprobs: Float[Tensor, " T"], batch: PackedBatch
) -> PolicyLoss:
    old_logprobs = counted_values(batch, "old_logprobs")
    advantages = counted_values(batch, "advantages")
    low, high = numbers.clip_ratio_low, numbers.clip_ratio_high
    if numbers.loss_mode == "gspo":
        ratio = sequence_ratio(logprobs, old_logprobs, counted_tokens(batch), batch.cu_seqlens)
    else:
        ratio = token_ratio(logprobs, old_logprobs)
    if numbers.loss_mode == "cispo":
        return clipped_weight_loss(logprobs, ratio, advantages, low, high)
    return clipped_ratio_loss(ratio, advantages, low, high, numbers.clip_ratio_c)


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
