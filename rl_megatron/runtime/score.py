"""Rewards over rollouts: each reward of each rollout, their weighted sum, their means."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rl_megatron.config.rewards import RewardConfig, RewardModelConfig, reward_label
from rl_megatron.errors import RolloutError
from rl_megatron.interfaces.records import Rollout
from rl_megatron.rewards import BatchReward, build_reward, normalise
from rl_megatron.rewards.normalise import Normaliser

Values = tuple[float | None, ...]
"""One reward of each rollout; None where it is not scored."""


@dataclass(frozen=True)
class NamedReward:
    """A reward of the run.

    Attributes:
        name: Its name in metrics and messages; unique within the run.
        weight: Its factor in the sum.
        values: The reward itself.
        normalise: What is done to the values of a batch before they are weighted; they are recorded
            without it.
        together: A model, which all ranks score all rollouts with; else each rollout is scored by
            one of them.
    """

    name: str
    weight: float
    values: BatchReward
    normalise: Normaliser | None = None
    together: bool = False


@dataclass(frozen=True)
class Scores:
    """What rollouts have earned, in their order.

    Attributes:
        rewards: Weighted sum over the rewards that gave a number; None where none did: such a
            rollout is not trained on and no part of its group's mean.
        by_name: The values of each reward, before normalisation and weight.

    Example:
        Rewards a (weight 1) gives (1, None) and b (weight 0.5) gives (2, None):
        rewards (2.0, None), means {"a": 1.0, "b": 2.0}, num_unscored 1.
    """

    rewards: tuple[float | None, ...]
    by_name: dict[str, Values]

    @property
    def num_unscored(self) -> int:
        """Rollouts whose reward is None."""
        return self.rewards.count(None)

    @property
    def means(self) -> dict[str, float]:
        """Mean of each reward over the rollouts it scored; without those that scored none."""
        scored = {n: [v for v in values if v is not None] for n, values in self.by_name.items()}
        return {name: math.fsum(values) / len(values) for name, values in scored.items() if values}


LoadModel = Callable[[RewardModelConfig, str], BatchReward]
"""Makes the reward of a model from its settings and the key that they stand under."""


def build_rewards(
    configs: Sequence[RewardConfig],
    max_response_tokens: int,
    load_model: LoadModel | None = None,
    key: str = "rewards",
    in_evaluation: bool = False,
) -> tuple[NamedReward, ...]:
    """The rewards of a run. A user's function is loaded here, so a wrong path stops the run early.

    Args:
        configs: Their settings.
        max_response_tokens: Length at which responses are cut.
        load_model: For those that are models.
        key: Where the settings stand, for messages.
        in_evaluation: Without normalisation by the batch at hand.

    Raises:
        ConfigError: A function that does not exist, or an over-long buffer that does not fit.
    """
    rewards = []
    for index, config in enumerate(configs):
        label = reward_label(config)
        if isinstance(config, RewardModelConfig):
            assert load_model is not None, "this run has no place for a reward model"
            values = load_model(config, f"{key}.{index}.path")
            normaliser = _normaliser(config, in_evaluation)
            rewards.append(NamedReward(label, config.weight, values, normaliser, together=True))
        else:
            values = build_reward(config, max_response_tokens)
            rewards.append(NamedReward(label, config.weight, values))
    return tuple(rewards)


def _normaliser(config: RewardModelConfig, in_evaluation: bool) -> Normaliser | None:
    if config.normalize == "fixed":
        return normalise.fixed(config.mean, config.std)
    return normalise.batch if config.normalize == "batch" and not in_evaluation else None


def score(rollouts: Sequence[Rollout], rewards: Sequence[NamedReward]) -> Scores:
    """The rewards of each rollout. Computed where it is called; the same on every rank.

    Raises:
        RolloutError: A reward gave something other than a finite number or None.
    """
    return add_up({reward.name: values_of(reward, rollouts) for reward in rewards}, rewards)


def values_of(reward: NamedReward, rollouts: Sequence[Rollout]) -> Values:
    """One reward of each rollout, before normalisation and weight; see `score`."""
    return _checked(reward.name, reward.values(rollouts), rollouts)


def add_up(by_name: Mapping[str, Values], rewards: Sequence[NamedReward]) -> Scores:
    """The weighted sums of the values of each reward, normalised where that is asked."""
    weights = [reward.weight for reward in rewards]
    columns = [
        by_name[reward.name] if reward.normalise is None else reward.normalise(by_name[reward.name])
        for reward in rewards
    ]
    sums = tuple(_weighted_sum(weights, row) for row in zip(*columns, strict=True))
    return Scores(sums, {reward.name: by_name[reward.name] for reward in rewards})


def _weighted_sum(weights: Sequence[float], row: Sequence[float | None]) -> float | None:
    # Weight 0 only records: such a value does not make a response a scored one.
    present = [w * v for w, v in zip(weights, row, strict=True) if v is not None and w != 0]
    return math.fsum(present) if present else None


def _checked(name: str, values: Sequence[object], rollouts: Sequence[Rollout]) -> Values:
    return tuple(
        None if value is None else _scalar(name, value, rollout)
        for value, rollout in zip(values, rollouts, strict=True)
    )


def _scalar(name: str, value: object, rollout: Rollout) -> float:
    """`value` as a float: a number, or an array or tensor of shape ()."""
    number = value.item() if getattr(value, "shape", None) == () else value  # type: ignore[attr-defined]
    where = f"rewards.{name}: row {rollout.prompt.row_id}, sample {rollout.sample_index}"
    if not isinstance(number, numbers.Real):
        shape = f" of shape {list(value.shape)}" if hasattr(value, "shape") else ""
        raise RolloutError(
            f"{where}: the reward is {value!r} ({type(value).__name__}{shape}); a reward must be "
            "one number, or None for a response that is not scored: change what it returns"
        )
    if not math.isfinite(number):
        raise RolloutError(
            f"{where}: the reward is {value!r}, which is not finite; return a number, or None for "
            "a response that is not scored"
        )
    return float(number)
