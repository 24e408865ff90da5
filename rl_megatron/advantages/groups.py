"""From the rewards of a rollout batch to advantages: groups, missing rewards, clamping."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rl_megatron.advantages.group_relative import group_mean_centred, group_z_score
from rl_megatron.advantages.leave_one_out import leave_one_out
from rl_megatron.advantages.whitening import reward_itself, whiten
from rl_megatron.errors import ConfigError, RolloutError
from rl_megatron.interfaces.batch import PackedBatch

ADVANTAGES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "grpo": group_z_score,
    "dr_grpo": group_mean_centred,
    "rloo": leave_one_out,
    "reinforce_plus_plus": reward_itself,
    "reinforce_plus_plus_baseline": group_mean_centred,
}
"""Estimator name -> (rewards of one group, adv_eps) -> advantages of that group."""

WHITENED = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")
"""Estimators whose advantages are then whitened over the whole rollout batch."""

_NEEDS_COMPANY = ("grpo", "rloo", "reinforce_plus_plus_baseline")


@dataclass(frozen=True)
class Advantages:
    """Advantages of a rollout batch, in the order of its rollouts.

    Attributes:
        values: One per rollout, float32; 0 where excluded.
        excluded: True for rollouts without a reward: they are not to be trained on.
        num_groups: Groups with at least one reward.
        num_zero_variance_groups: Those of them whose rewards are all equal (one reward alone
            included): compared with each other they teach the policy nothing.
    """

    values: Float[Tensor, " N"]
    excluded: Bool[Tensor, " N"]
    num_groups: int
    num_zero_variance_groups: int


def compute_advantages(
    rewards: Sequence[float | None],
    group_ids: Sequence[int],
    group_size: int,
    *,
    adv_estimator: str,
    adv_eps: float = 1e-4,
    adv_clip: float | None = None,
    num_tokens: Sequence[int] | None = None,
) -> Advantages:
    """Advantage of every rollout over its own group, or over the batch.

    A group is the rollouts of equal `group_ids`, wherever they stand in the batch; texts are not
    compared. A missing reward (None or NaN) takes part in nothing: the statistics of its group
    are those of the others, and the rollout is excluded.

    Args:
        rewards: One per rollout.
        group_ids: The prompt each rollout answers, by the identity of its row.
        group_size: Rollouts per prompt, as configured.
        adv_estimator: A key of ADVANTAGES.
        adv_eps: Added to the standard deviation (grpo, reinforce_plus_plus...).
        adv_clip: Advantages are clamped to [-adv_clip, adv_clip]; None: off.
        num_tokens: Tokens of each rollout that are trained on. Whitening is over tokens, so this
            is how often each counts; None: once each.

    Raises:
        ConfigError: The estimator is unknown, or compares with siblings and group_size is 1.
        RolloutError: A group has more or fewer rollouts than group_size, or a reward is infinite.
    """
    _check_estimator(adv_estimator, group_size)
    known = [math.nan if reward is None else float(reward) for reward in rewards]
    given = torch.tensor(known, dtype=torch.float64)
    if given.isinf().any():
        first = int(given.isinf().nonzero()[0])
        raise RolloutError(
            f"reward of rollout {first} (prompt row {group_ids[first]}) is {known[first]}; a "
            "reward must be a finite number, or None where a response cannot be scored"
        )
    excluded = given.isnan()
    values = torch.zeros_like(given)
    num_groups = num_zero_variance_groups = 0
    for members in _groups(group_ids, group_size, len(known)):
        scored = members[~excluded[members]]
        if scored.numel() == 0:
            continue
        num_groups += 1
        num_zero_variance_groups += int(given[scored].max() == given[scored].min())
        values[scored] = ADVANTAGES[adv_estimator](given[scored], adv_eps)
    if adv_estimator in WHITENED:
        counts = torch.ones_like(given) if num_tokens is None else torch.tensor(num_tokens)
        counts = torch.where(excluded, 0, counts)
        values = torch.where(excluded, 0.0, whiten(values, counts, adv_eps))
    if adv_clip is not None:
        values = values.clamp(-adv_clip, adv_clip)
    return Advantages(values.float(), excluded, num_groups, num_zero_variance_groups)


def to_tokens(advantages: Float[Tensor, " N"], batch: PackedBatch) -> Float[Tensor, " T"]:
    """Each rollout's advantage on every response token of its sequence, 0 on other tokens.

    Args:
        advantages: One per sequence of the batch, in its order.
        batch: The rollouts, packed.
    """
    return torch.where(batch.response_mask, advantages[batch.segment_ids], 0.0)


def with_advantages(batch: PackedBatch, advantages: Advantages) -> PackedBatch:
    """The batch with its advantages set, and excluded rollouts out of the response mask."""
    assert advantages.values.shape[0] == batch.num_sequences, "one advantage per sequence"
    mask = batch.response_mask & ~advantages.excluded[batch.segment_ids]
    masked = batch.with_fields(response_mask=mask)
    return masked.with_fields(advantages=to_tokens(advantages.values, masked))


def _check_estimator(adv_estimator: str, group_size: int) -> None:
    if adv_estimator not in ADVANTAGES:
        raise ConfigError(
            f"algorithm.adv_estimator: {adv_estimator!r} is unknown; "
            f"use one of {', '.join(ADVANTAGES)}"
        )
    if group_size < 2 and adv_estimator in _NEEDS_COMPANY:
        raise ConfigError(
            f"rollout.group_size: {group_size} leaves nothing to compare a rollout with, which "
            f"algorithm.adv_estimator {adv_estimator!r} needs; set rollout.group_size to 2 or more"
        )


def _groups(group_ids: Sequence[int], group_size: int, num_rollouts: int) -> list[Tensor]:
    """Indices of the rollouts of each group."""
    assert len(group_ids) == num_rollouts, "one group id per reward"
    members: dict[int, list[int]] = defaultdict(list)
    for index, group in enumerate(group_ids):
        members[group].append(index)
    for group, indices in members.items():
        if len(indices) != group_size:
            raise RolloutError(
                f"prompt row {group} has {len(indices)} rollouts, rollout.group_size is "
                f"{group_size}: the groups mix prompts; each prompt of a batch must be a row of "
                "its own, and the engine must return group_size rollouts of each"
            )
    return [torch.tensor(indices) for indices in members.values()]
