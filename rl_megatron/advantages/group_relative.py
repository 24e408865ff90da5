"""Advantages against the mean of one's own group: z-score and mean only."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def group_z_score(rewards: Float[Tensor, " G"], adv_eps: float) -> Float[Tensor, " G"]:
    """(r - mean) / (std + adv_eps), the std unbiased (GRPO, arXiv 2402.03300, section 4.1.2).

    Rewards that are all equal, one reward alone included, give exactly 0: compared as they are,
    because a mean that does not round back would leave a residue to be divided by a std of 0.

    Args:
        rewards: Rewards of one group, float64.
        adv_eps: Keeps the quotient finite where the std is small.
    """
    if rewards.max() == rewards.min():
        return torch.zeros_like(rewards)
    return (rewards - rewards.mean()) / (rewards.std(correction=1) + adv_eps)


def group_mean_centred(rewards: Float[Tensor, " G"], adv_eps: float) -> Float[Tensor, " G"]:
    """r - mean, exactly 0 where all are equal (Dr.GRPO, arXiv 2503.20783, section 3.2).

    Args:
        rewards: Rewards of one group, float64.
        adv_eps: Not used: nothing is divided. All estimators take the same arguments.
    """
    if rewards.max() == rewards.min():
        return torch.zeros_like(rewards)
    return rewards - rewards.mean()
