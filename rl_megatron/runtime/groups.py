"""Where the groups of a rollout batch come from: prompts in order, refilled where that is asked.

With dynamic sampling (DAPO, arXiv 2503.14476, eq. 11) groups whose rewards are all equal teach
nothing and are replaced by groups of further prompts, until the batch is full.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from rl_megatron.config.rollout import RolloutConfig
from rl_megatron.data.sampler import RowCursor
from rl_megatron.errors import RolloutError
from rl_megatron.interfaces import metric_names as names
from rl_megatron.interfaces.protocols import RolloutEngine, WeightSync
from rl_megatron.interfaces.records import Prompt, Rollout, Sampling
from rl_megatron.metrics.timing import Span
from rl_megatron.parallel.process import Process
from rl_megatron.runtime.rollout_batch import (
    gather_scores,
    group_ids,
    require_scores,
    rollout_seed,
)
from rl_megatron.runtime.score import NamedReward, Scores

Phase = Callable[[str], AbstractContextManager[Span]]


@dataclass(frozen=True)
class Sampled:
    """A rollout batch.

    Attributes:
        rollouts: prompts_per_batch x group_size of them.
        group_ids: The group of each.
        scores: What each has earned.
        metrics: Of dynamic sampling; empty without.
    """

    rollouts: list[Rollout]
    group_ids: list[int]
    scores: Scores
    metrics: dict[str, float]


@dataclass(frozen=True)
class _Group:
    """The rollouts of one prompt, in the order of their samples, and what they have earned."""

    rollouts: list[Rollout]
    rewards: list[float | None]
    by_name: dict[str, list[float | None]]

    def deciding(self, reward: str | None) -> set[float]:
        """The different values of a reward (None: of the sum) among those that were scored."""
        values = self.rewards if reward is None else self.by_name[reward]
        return {value for value in values if value is not None}


class GroupSampler:
    """Draws prompts, samples a group for each, and scores it. Called by all ranks together.

    Every rank draws the same prompts and sees the same scores, so all decide alike.

    Args:
        sync: Gives the engine that samples.
        rewards: Score.
        prompts: All rows.
        cursor: Which of them come next.
        sampling: How responses are drawn.
        rollout: Sizes, and dynamic sampling if it is on.
        seed: Of the run.
        process: This rank.

    Attributes:
        cursor: As given; prompts that were drawn and not needed are not passed.
    """

    def __init__(
        self,
        sync: WeightSync,
        rewards: Sequence[NamedReward],
        prompts: Sequence[Prompt],
        cursor: RowCursor,
        sampling: Sampling,
        rollout: RolloutConfig,
        seed: int,
        process: Process,
    ) -> None:
        self._sync = sync
        self._rewards = rewards
        self._prompts = prompts
        self.cursor = cursor
        self._sampling = sampling
        self._rollout = rollout
        self._seed = seed
        self._process = process

    def sample(self, number: int, phase: Phase, policy_version: int) -> Sampled:
        """Rollout batch `number`, counted from 1, by the policy as it is now.

        Args:
            number: Decides, with the seed, what is sampled.
            phase: Times the parts "generate" and "score".
            policy_version: Optimiser steps that the policy has made.

        Raises:
            RolloutError: No response could be scored, or the batch could not be filled.
        """
        wanted = self._rollout.prompts_per_batch
        with self._sync.sampling(policy_version) as engine:
            if self._rollout.dynamic_sampling is not None:
                return self._fill(engine, number, wanted, phase)
            groups = self._draw(engine, 0, wanted, rollout_seed(self._seed, number), phase)
        self.cursor.take(wanted)
        sampled = _joined(groups, {})
        require_scores(sampled.scores)
        return sampled

    def _fill(self, engine: RolloutEngine, number: int, wanted: int, phase: Phase) -> Sampled:
        """A batch of groups whose rewards differ.

        Groups count in the order of their prompts. Prompts drawn beyond the last one that is
        needed are not used up: the next batch begins with them.
        """
        settings = self._rollout.dynamic_sampling
        assert settings is not None
        drawn: list[_Group] = []
        kept: list[int] = []
        for refill in range(settings.max_refills + 1):
            # As many as are likely to be needed, but no more than a batch.
            likely = math.ceil((wanted - len(kept)) * len(drawn) / len(kept)) if kept else wanted
            seed = rollout_seed(self._seed, number, refill)
            groups = self._draw(engine, len(drawn), min(likely, wanted), seed, phase)
            for index, group in enumerate(groups, start=len(drawn)):
                if len(group.deciding(settings.reward)) > 1:
                    kept.append(index)
            drawn += groups
            if len(kept) >= wanted:
                break
        else:
            raise RolloutError(self._why_not_full(number, drawn, len(kept)))
        kept = kept[:wanted]
        used = kept[-1] + 1
        self.cursor.take(used)
        seen = [r for group in drawn[:used] for r in group.rewards if r is not None]
        metrics = {
            names.ROLLOUT_REFILLS: float(refill),
            names.ROLLOUT_REPLACED: float(used - wanted),
            names.ROLLOUT_DRAWN_REWARD: math.fsum(seen) / len(seen),
        }
        return _joined([drawn[i] for i in kept], metrics)

    def _draw(
        self, engine: RolloutEngine, skip: int, count: int, seed: int, phase: Phase
    ) -> list[_Group]:
        """The groups of `count` prompts after the next `skip`, in the order of the prompts."""
        prompts = [self._prompts[i] for i in self.cursor.peek(count, skip)]
        group_size = self._rollout.group_size
        with phase("generate") as span:
            rollouts = engine.generate(prompts, self._sampling, group_size, seed)
            span.tokens = sum(len(rollout.response_ids) for rollout in rollouts)
        with phase("score"):
            scores = gather_scores(rollouts, self._rewards, self._process)
        members: dict[int, list[int]] = {}
        for index, group in enumerate(group_ids(rollouts, group_size)):
            members.setdefault(group, []).append(index)
        return [
            _Group(
                rollouts=[rollouts[i] for i in indices],
                rewards=[scores.rewards[i] for i in indices],
                by_name={n: [values[i] for i in indices] for n, values in scores.by_name.items()},
            )
            for indices in members.values()
        ]

    def _why_not_full(self, number: int, drawn: Sequence[_Group], num_kept: int) -> str:
        settings = self._rollout.dynamic_sampling
        assert settings is not None
        values = [group.deciding(settings.reward) for group in drawn]
        equal = Counter(next(iter(value)) for value in values if len(value) == 1)
        seen = [f"{count} have {value:g} throughout" for value, count in equal.most_common(3)]
        if unscored := sum(not value for value in values):
            seen.append(f"{unscored} have no reward")
        return (
            f"rollout.dynamic_sampling.max_refills = {settings.max_refills}: rollout batch "
            f"{number} has {num_kept} of {self._rollout.prompts_per_batch} groups whose rewards "
            f"({settings.reward or 'their sum'}) differ after {len(drawn)} prompts; of the other "
            f"groups {', '.join(seen)}. Take prompts that are neither too hard nor too easy, raise "
            "rollout.group_size or max_refills, or set rollout.dynamic_sampling=null"
        )


def _joined(groups: Sequence[_Group], metrics: dict[str, float]) -> Sampled:
    by_name = {
        name: tuple(value for group in groups for value in group.by_name[name])
        for name in groups[0].by_name
    }
    return Sampled(
        rollouts=[rollout for group in groups for rollout in group.rollouts],
        group_ids=[index for index, group in enumerate(groups) for _ in group.rollouts],
        scores=Scores(tuple(r for group in groups for r in group.rewards), by_name),
        metrics=metrics,
    )
