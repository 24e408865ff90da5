"""Kahneman-Tversky optimisation: the objective of responses that are each desirable or not."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rl_megatron.interfaces import metric_names as names
from rl_megatron.interfaces.batch import PackedBatch
from rl_megatron.interfaces.objective import LossOutput, ModelOutput, Objective, Totals
from rl_megatron.losses.aggregate import aggregation_weights
from rl_megatron.losses.sums import counted_tokens, counted_values, segment_sum, zero_outside


def kto_loss(
    rewards: Float[Tensor, " N"], desirable: Bool[Tensor, " N"], baseline: float
) -> Float[Tensor, " N"]:
    """1 - sigmoid(reward - baseline) of a desirable response, 1 - sigmoid(baseline - reward) of an
    undesirable one (arXiv 2402.01306, eq. 8, with lambda left to the caller).

    Args:
        rewards: beta times the log-ratio of policy and reference, summed over the response.
        desirable: The verdict on each response.
        baseline: beta times the KL of policy and reference, a constant.
    """
    above = torch.where(desirable, rewards - baseline, baseline - rewards)
    # 1 - sigmoid(x) loses its digits where x is large.
    return torch.sigmoid(-above)


def baseline_kl(batch: PackedBatch, logprobs: Float[Tensor, " T"]) -> float:
    """max(0, mean over sequences of log p_policy - log p_reference), summed over each response.

    The estimate of KL(policy || reference) that KTO measures rewards from (arXiv 2402.01306,
    section 4.1): `batch` holds responses to other prompts than their own, of a whole mini-batch.

    Args:
        batch: With `ref_logprobs`; sequences without a valid token are not counted.
        logprobs: Under the policy.
    """
    assert batch.ref_logprobs is not None, "the KL needs ref_logprobs in the batch"
    ratio = zero_outside(batch.response_mask, logprobs - batch.ref_logprobs)
    count = int((segment_sum(batch.response_mask, batch.cu_seqlens) > 0).sum())
    return max(0.0, float(ratio.sum()) / max(count, 1))


def kto_objective(
    *,
    beta: float = 0.1,
    loss_type: str = "kto",
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    kl: float = 0.0,
) -> Objective:
    """The objective mean over valid responses of their weight times `kto_loss`.

    The metrics have TRL's names: rewards and log-probs are means over the desirable ("chosen") and
    the undesirable ("rejected") responses of the mini-batch, and are left out where it has none of
    them. logps/ are sums over a response.

    Args:
        beta: Strength of the pull towards the reference.
        loss_type: kto, or apo_zero_unpaired (arXiv 2408.06266, eq. 7, each term by itself), which
            is the same with a KL of 0.
        desirable_weight: Factor of desirable responses.
        undesirable_weight: Factor of undesirable responses.
        kl: `baseline_kl` of the mini-batch under the policy as it is before the step.
    """
    assert loss_type == "kto" or kl == 0, f"{loss_type} measures rewards from 0"

    def loss(output: ModelOutput, batch: PackedBatch, totals: Totals) -> LossOutput:
        assert batch.desirable is not None, "KTO needs a verdict on every response"
        counted = counted_tokens(batch)
        logps = segment_sum(zero_outside(counted, output.logprobs), batch.cu_seqlens)
        ref_logps = segment_sum(counted_values(batch, "ref_logprobs"), batch.cu_seqlens)
        rewards = beta * (logps - ref_logps)
        desirable = batch.desirable
        plain = kto_loss(rewards, desirable, beta * kl)
        losses = torch.where(desirable, desirable_weight * plain, undesirable_weight * plain)
        valid = segment_sum(counted, batch.cu_seqlens) > 0
        total = torch.where(valid, losses, 0.0).sum() / max(totals.num_sequences, 1)
        shares = {names.LOSS_KTO: total}
        shares |= _of_each_kind(valid, desirable, rewards, logps, totals)
        return LossOutput(loss=total, metrics={k: v.detach() for k, v in shares.items()})

    return Objective(name="kto", weigh=_weigh, loss=loss)


def _of_each_kind(
    valid: Tensor, desirable: Tensor, rewards: Tensor, logps: Tensor, totals: Totals
) -> dict[str, Tensor]:
    """This micro-batch's share of the means over desirable and over undesirable responses."""
    shares: dict[str, Tensor] = {}
    for kind, count, reward, logp in (
        (desirable, totals.num_desirable, names.REWARDS_CHOSEN, names.LOGPS_CHOSEN),
        (
            ~desirable,
            totals.num_sequences - totals.num_desirable,
            names.REWARDS_REJECTED,
            names.LOGPS_REJECTED,
        ),
    ):
        if count > 0:
            shares[reward] = torch.where(valid & kind, rewards, 0.0).sum() / count
            shares[logp] = torch.where(valid & kind, logps, 0.0).sum() / count
    if names.REWARDS_CHOSEN in shares and names.REWARDS_REJECTED in shares:
        shares[names.REWARDS_MARGINS] = (
            shares[names.REWARDS_CHOSEN] - shares[names.REWARDS_REJECTED]
        )
    return shares


def _weigh(batch: PackedBatch) -> PackedBatch:
    """Each response with a valid token weighs the same; the loss reads only which tokens count."""
    weights = aggregation_weights(batch.cu_seqlens, batch.response_mask, "seq-mean-token-mean")
    return batch.with_fields(loss_weights=weights)
