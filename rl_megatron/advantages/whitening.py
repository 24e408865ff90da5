"""REINFORCE++: rewards against the whole rollout batch, brought to mean 0 and deviation 1."""

from __future__ import annotations

import torch
from jaxtyping import Float, Shaped
from torch import Tensor


def reward_itself(rewards: Float[Tensor, " G"], adv_eps: float) -> Float[Tensor, " G"]:
    """r: nothing is subtracted within the group (REINFORCE++, arXiv 2501.03262).

    Args:
        rewards: Rewards of one group, float64.
        adv_eps: Not used: nothing is divided. All estimators take the same arguments.
    """
    return rewards.clone()


def whiten(
    values: Float[Tensor, " N"], counts: Shaped[Tensor, " N"], adv_eps: float
) -> Float[Tensor, " N"]:
    """(v - mean) / (std + adv_eps), mean and unbiased std over all values of the rollout batch.

    Each value stands for `counts` equal ones, as an advantage does for the tokens of its response:
    the std is sqrt(sum(n * (v - mean)^2) / (sum(n) - 1)). Values that are all equal, one alone
    included, give exactly 0.

    The whole batch is at hand on every rank, so no layout has a part in it.

    Args:
        values: One per rollout, float64.
        counts: How often each counts; what counts 0 times changes nothing and gives 0.
        adv_eps: Keeps the quotient finite where the std is small.
    """
    counted = counts > 0
    present = values[counted]
    if present.numel() == 0 or present.max() == present.min():
        return torch.zeros_like(values)
    n = counts[counted].double()
    mean = (n * present).sum() / n.sum()
    variance = (n * (present - mean).square()).sum() / (n.sum() - 1)
    return torch.where(counted, (values - mean) / (variance.sqrt() + adv_eps), 0.0)
