"""Supervised fine-tuning: negative log-likelihood, token-mean over response tokens."""

from __future__ import annotations

from rl_megatron.interfaces.batch import PackedBatch
from rl_megatron.interfaces.metric_names import LOSS_NLL, POLICY_ENTROPY
from rl_megatron.interfaces.objective import LossOutput, ModelOutput, Objective, Totals
from rl_megatron.losses.aggregate import aggregation_weights
from rl_megatron.losses.sums import counted_tokens, counted_values, masked_sum


def sft_objective() -> Objective:
    """The objective of supervised fine-tuning; its metrics are per token."""
    return Objective(name="sft", weigh=_weigh, loss=_loss, token_local=True)


def _weigh(batch: PackedBatch) -> PackedBatch:
    weights = aggregation_weights(batch.cu_seqlens, batch.response_mask, "token-mean")
    return batch.with_fields(loss_weights=weights)


def _loss(output: ModelOutput, batch: PackedBatch, totals: Totals) -> LossOutput:
    loss = masked_sum(-output.logprobs, counted_values(batch, "loss_weights"))
    entropy = masked_sum(output.entropy, counted_tokens(batch)) / max(totals.num_tokens, 1)
    return LossOutput(
        loss=loss,
        metrics={LOSS_NLL: loss.detach(), POLICY_ENTROPY: entropy.detach()},
    )
