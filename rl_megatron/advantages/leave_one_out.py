"""Advantages against the mean of the others in one's group."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


def leave_one_out(rewards: Float[Tensor, " G"], adv_eps: float) -> Float[Tensor, " G"]:
    """r_i - mean of the other rewards, not scaled (RLOO, arXiv 2402.14740, section 3.3).

    Equal to (r_i - mean of all) * G / (G - 1). Exactly 0 where all rewards are equal, and for a
    reward alone, which has nothing to be compared with.

    Args:
        rewards: Rewards of one group, float64.
        adv_eps: Not used: nothing is divided. All estimators take the same arguments.
    """
    if rewards.max() == rewards.min():
        return torch.zeros_like(rewards)
    others = (rewards.sum() - rewards) / (rewards.shape[0] - 1)
    return rewards - others
