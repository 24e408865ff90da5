"""Direct preference optimisation: sigmoid loss, with label smoothing and an NLL term."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from rl_megatron.errors import ConfigError
from rl_megatron.interfaces import metric_names as names
from rl_megatron.interfaces.batch import PackedBatch
from rl_megatron.interfaces.objective import LossOutput, ModelOutput, Objective, Totals
from rl_megatron.losses.aggregate import aggregation_weights, valid_pairs
from rl_megatron.losses.sums import counted_tokens, counted_values, segment_sum, zero_outside


class ImplicitRewards(NamedTuple):
    """beta times the log-ratio of policy and reference, per pair."""

    chosen: Float[Tensor, " P"]
    rejected: Float[Tensor, " P"]


def implicit_rewards(
    logps: Float[Tensor, " N"], ref_logps: Float[Tensor, " N"], beta: float
) -> ImplicitRewards:
    """beta * (logps - ref_logps) of chosen and rejected (arXiv 2305.18290, eq. 5 without log Z).

    Args:
        logps: Log-prob of each response, summed over its tokens: chosen, rejected, chosen, ...
        ref_logps: The same under the reference.
        beta: Strength of the pull towards the reference.
    """
    rewards = beta * (logps - ref_logps)
    return ImplicitRewards(rewards[0::2], rewards[1::2])


def sigmoid_loss(margins: Float[Tensor, " P"], label_smoothing: float) -> Float[Tensor, " P"]:
    """-(1 - e) * logsigmoid(margin) - e * logsigmoid(-margin), e the label smoothing.

    DPO (arXiv 2305.18290, eq. 7); with e > 0 conservative DPO, for labels that are wrong with
    probability e. At margin 0 it is ln 2 for every e.
    """
    return -(1 - label_smoothing) * logsigmoid(margins) - label_smoothing * logsigmoid(-margins)


PREFERENCE_LOSSES: dict[str, Callable[[Tensor, float], Tensor]] = {"sigmoid": sigmoid_loss}


def dpo_objective(
    *,
    beta: float = 0.1,
    loss_type: str = "sigmoid",
    label_smoothing: float = 0.0,
    rpo_alpha: float | None = None,
) -> Objective:
    """The objective loss/dpo + rpo_alpha * loss/nll, a mean over the valid pairs.

    Log-probs are summed over response tokens, not averaged. A pair of which one side has no valid
    token counts neither above nor below the line. The metrics are per pair, under TRL's names;
    as there, `rewards/accuracies` counts margins above 0 only, so it is 0 before the first step.

    `rpo_alpha` weighs the negative log-likelihood of the chosen response: its mean over that
    response's own tokens, then over pairs (arXiv 2404.19733, eq. 2). TRL takes one mean over the
    chosen tokens of all pairs of a micro-batch instead; the two agree where lengths are equal.

    Raises:
        ConfigError: The loss type is unknown.
    """
    if loss_type not in PREFERENCE_LOSSES:
        known = ", ".join(PREFERENCE_LOSSES)
        raise ConfigError(f"loss.loss_type: {loss_type!r} is not offered; use one of: {known}")

    def loss(output: ModelOutput, batch: PackedBatch, totals: Totals) -> LossOutput:
        assert batch.paired, "DPO needs pairs: chosen, rejected, chosen, rejected, ..."
        counted = counted_tokens(batch)
        logps = segment_sum(zero_outside(counted, output.logprobs), batch.cu_seqlens)
        ref_logps = segment_sum(counted_values(batch, "ref_logprobs"), batch.cu_seqlens)
        rewards = implicit_rewards(logps, ref_logps, beta)
        margins = rewards.chosen - rewards.rejected
        per_pair = {
            names.LOSS_DPO: PREFERENCE_LOSSES[loss_type](margins, label_smoothing),
            names.REWARDS_CHOSEN: rewards.chosen,
            names.REWARDS_REJECTED: rewards.rejected,
            names.REWARDS_MARGINS: margins,
            names.REWARDS_ACCURACIES: (margins > 0).double(),
            names.LOGPS_CHOSEN: logps[0::2],
            names.LOGPS_REJECTED: logps[1::2],
        }
        if rpo_alpha is not None:
            num_tokens = segment_sum(counted, batch.cu_seqlens).clamp(min=1)
            per_pair[names.LOSS_NLL] = (-logps / num_tokens)[0::2]
        valid = valid_pairs(batch.cu_seqlens, counted)
        shares = {
            name: torch.where(valid, values, 0.0).sum() / max(totals.num_pairs, 1)
            for name, values in per_pair.items()
        }
        total = shares[names.LOSS_DPO]
        if rpo_alpha is not None:
            total = total + rpo_alpha * shares[names.LOSS_NLL]
        return LossOutput(loss=total, metrics={k: v.detach() for k, v in shares.items()})

    return Objective(name="dpo", weigh=_weigh, loss=loss)


def _weigh(batch: PackedBatch) -> PackedBatch:
    """Each sequence of a valid pair weighs the same; the loss reads only which tokens count.

    What weighs in DPO is the pair: 1 / totals.num_pairs if it is valid.
    """
    valid = valid_pairs(batch.cu_seqlens, batch.response_mask).repeat_interleave(2)
    counted = batch.response_mask & valid.repeat_interleave(batch.lengths)
    weights = aggregation_weights(batch.cu_seqlens, counted, "seq-mean-token-mean")
    return batch.with_fields(loss_weights=weights)
