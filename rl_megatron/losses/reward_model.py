"""Reward models: the Bradley-Terry likelihood of preferences."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from rl_megatron.interfaces import metric_names as names
from rl_megatron.interfaces.batch import PackedBatch
from rl_megatron.interfaces.objective import LossOutput, ModelOutput, Objective, Totals
from rl_megatron.losses.aggregate import valid_pairs, weigh_pairs
from rl_megatron.losses.sums import counted_tokens


def bradley_terry_loss(
    margins: Float[Tensor, " P"], asked: Float[Tensor, " P"] | float = 0.0
) -> Float[Tensor, " P"]:
    """-logsigmoid(margin - asked), where P(chosen is better) = sigmoid(margin).

    InstructGPT (arXiv 2203.02155, eq. 1); with a margin asked of each pair Llama 2 (arXiv
    2307.09288, eq. 2).

    Args:
        margins: Reward of chosen less that of rejected.
        asked: By how much one is to exceed the other.
    """
    return -logsigmoid(margins - asked)


def centering_loss(
    chosen: Float[Tensor, " P"], rejected: Float[Tensor, " P"]
) -> Float[Tensor, " P"]:
    """(chosen + rejected)^2, least where rewards are around 0 (arXiv 2312.09244, section 2)."""
    return (chosen + rejected).square()


def reward_model_objective(*, center_rewards_coefficient: float | None = None) -> Objective:
    """The objective loss/reward_model + center_rewards_coefficient * loss/centering.

    Both are means over the valid pairs; a pair of which one side has no response counts neither
    above nor below the line, whatever its scores are. The metrics are per pair, under the names
    that DPO has; `rewards/margins` is without the margin that a row asks for, and
    `rewards/accuracies` counts margins above 0.
    """

    def loss(output: ModelOutput, batch: PackedBatch, totals: Totals) -> LossOutput:
        assert batch.paired, "a reward model needs pairs: chosen, rejected, chosen, rejected, ..."
        scores = output.scores
        if scores is None or scores.shape != (batch.num_sequences,):
            found = "none" if scores is None else list(scores.shape)
            raise ValueError(
                f"a reward model gives one score for each of {batch.num_sequences} sequences, "
                f"found shape {found}"
            )
        valid = valid_pairs(batch.cu_seqlens, counted_tokens(batch))
        chosen = torch.where(valid, scores[0::2], 0.0).double()
        rejected = torch.where(valid, scores[1::2], 0.0).double()
        margins = chosen - rejected
        asked = torch.zeros_like(margins) if batch.margins is None else batch.margins[0::2].double()
        per_pair = {
            names.LOSS_REWARD_MODEL: bradley_terry_loss(margins, asked),
            names.REWARDS_CHOSEN: chosen,
            names.REWARDS_REJECTED: rejected,
            names.REWARDS_MARGINS: margins,
            names.REWARDS_ACCURACIES: (margins > 0).double(),
        }
        if center_rewards_coefficient is not None:
            per_pair[names.LOSS_CENTERING] = centering_loss(chosen, rejected)
        shares = {
            name: torch.where(valid, values, 0.0).sum() / max(totals.num_pairs, 1)
            for name, values in per_pair.items()
        }
        total = shares[names.LOSS_REWARD_MODEL]
        if center_rewards_coefficient is not None:
            total = total + center_rewards_coefficient * shares[names.LOSS_CENTERING]
        return LossOutput(loss=total, metrics={k: v.detach() for k, v in shares.items()})

    return Objective(name="reward_model", weigh=weigh_pairs, loss=loss)
