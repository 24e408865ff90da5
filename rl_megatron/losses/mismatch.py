"""How far the engine's log-probs are from the trainer's, for the same weights and tokens."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rl_megatron.interfaces.metric_names import ROLLOUT_MISMATCH_KL, ROLLOUT_MISMATCH_MAX_ABS
from rl_megatron.losses.kl import k3
from rl_megatron.losses.sums import masked_sum, zero_outside


def rollout_mismatch(
    old_logprobs: Float[Tensor, " T"],
    rollout_logprobs: Float[Tensor, " T"],
    response_mask: Bool[Tensor, " T"],
) -> dict[str, float]:
    """KL(engine || trainer) per response token (k3), and the largest difference, in nats.

    Takes the whole batch; both are 0 where no token is valid.
    """
    difference = zero_outside(response_mask, old_logprobs) - zero_outside(
        response_mask, rollout_logprobs
    )
    num_tokens = max(int(response_mask.sum()), 1)
    largest = torch.cat([difference.abs(), difference.new_zeros(1)]).max()
    return {
        ROLLOUT_MISMATCH_KL: float(masked_sum(k3(difference), response_mask)) / num_tokens,
        ROLLOUT_MISMATCH_MAX_ABS: float(largest),
    }
