"""Held-out prompts answered and scored; held-out rows under the objective."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from rl_megatron.interfaces import metric_names as names
from rl_megatron.interfaces.batch import JudgedBatch, PackedBatch
from rl_megatron.interfaces.objective import ModelOutput, Objective
from rl_megatron.interfaces.protocols import (
    PolicyBackend,
    RewardScorer,
    RolloutEngine,
    Scorer,
    WeightSync,
)
from rl_megatron.interfaces.records import Prompt, Rollout, Sampling
from rl_megatron.losses.aggregate import totals
from rl_megatron.losses.kto import baseline_kl
from rl_megatron.losses.sums import counted_tokens, segment_sum
from rl_megatron.parallel.process import Process
from rl_megatron.runtime.rollout_batch import score_together
from rl_megatron.runtime.score import NamedReward


@dataclass(frozen=True)
class Evaluation:
    """Prompts that are answered once greedily and once at temperature 1, and scored.

    Attributes:
        prompts: Held-out prompts.
        rewards: How answers are scored.
        sampling: Length and stop tokens; the temperature is set here.
        batch_size: Prompts answered side by side.
        seed: Of the sampled answers, the same at each evaluation.
    """

    prompts: Sequence[Prompt]
    rewards: Sequence[NamedReward]
    sampling: Sampling
    batch_size: int
    seed: int

    def run(self, sync: WeightSync, process: Process) -> dict[str, float]:
        """Mean rewards over the prompts, of the policy as it is now."""
        with sync.sampling() as engine:
            answers = {
                names.EVALUATION_GREEDY: self._answers(engine, 0.0),
                names.EVALUATION_SAMPLED: self._answers(engine, 1.0),
            }
        means = {}
        for name, rollouts in answers.items():
            scores = score_together(rollouts, self.rewards, process)
            means[name] = statistics.fmean(r for r in scores.rewards if r is not None)
        return means

    def _answers(self, engine: RolloutEngine, temperature: float) -> list[Rollout]:
        sampling = replace(self.sampling, temperature=temperature)
        rollouts: list[Rollout] = []
        for start in range(0, len(self.prompts), self.batch_size):
            batch = self.prompts[start : start + self.batch_size]
            rollouts += engine.generate(batch, sampling, 1, self.seed)
        return rollouts


def held_out_metrics(
    policy: PolicyBackend,
    reference: Scorer | None,
    objective: Objective,
    held_out: Mapping[str, PackedBatch],
) -> dict[str, float]:
    """The objective's metrics on each set of held-out rows, as `evaluation/<set>/<metric>`, or
    `evaluation/<metric>` where a set has no name; nothing is updated.

    Args:
        policy: The model at work.
        reference: What it is compared with, where the objective does.
        objective: Loss and metrics.
        held_out: All rows of each set, by its name.
    """
    return {
        in_evaluation(name, metric): value
        for name, batch in held_out.items()
        for metric, value in objective_metrics(policy, reference, objective, batch).items()
    }


def held_out_kto_metrics(
    policy: PolicyBackend,
    reference: Scorer,
    objective_at: Callable[[float], Objective],
    held_out: Mapping[str, JudgedBatch],
) -> dict[str, float]:
    """The same of KTO, each set with a KL of its own.

    Args:
        policy: The model at work.
        reference: What it is compared with.
        objective_at: The objective at a KL.
        held_out: All rows of each set, by its name.
    """
    found: dict[str, float] = {}
    for name, batch in held_out.items():
        kl = mismatch_kl(policy, reference, batch)
        metrics = objective_metrics(policy, reference, objective_at(kl), batch.rows)
        found |= {in_evaluation(name, m): v for m, v in {**metrics, names.KL: kl}.items()}
    return found


def mismatch_kl(policy: PolicyBackend, reference: Scorer, batch: JudgedBatch) -> float:
    """`baseline_kl` of the whole batch, equal on all ranks; 0 where it has none. Collective."""
    if batch.mismatched is None:
        return 0.0
    mismatched = batch.mismatched
    scored = mismatched.with_fields(ref_logprobs=reference.logprobs(mismatched))
    return baseline_kl(scored, policy.logprobs(mismatched))


def in_evaluation(name: str, metric: str) -> str:
    """What a metric is called on the set `name` of held-out rows."""
    return f"evaluation/{name}/{metric}" if name else f"evaluation/{metric}"


def objective_metrics(
    policy: PolicyBackend,
    reference: Scorer | None,
    objective: Objective,
    batch: PackedBatch,
) -> dict[str, float]:
    """The objective's metrics on all rows of `batch`; see `held_out_metrics`."""
    if reference is not None:
        batch = batch.with_fields(ref_logprobs=reference.logprobs(batch))
    batch = objective.weigh(batch)
    logprobs = policy.logprobs(batch)
    output = ModelOutput(logprobs, torch.zeros_like(logprobs))
    result = objective.loss(output, batch, totals(batch))
    # The entropy is not known from log-probs of the rows' own tokens.
    known = {name: v for name, v in result.metrics.items() if name != names.POLICY_ENTROPY}
    metrics = {names.LOSS_TOTAL: result.loss, **known}
    return {name: float(value) for name, value in metrics.items()}


def reward_metrics(
    model: RewardScorer, objective: Objective, held_out: Mapping[str, PackedBatch]
) -> dict[str, float]:
    """The objective's metrics on each set of held-out pairs, under the names of `held_out_metrics`,
    with mean and standard deviation of the rewards that the model gives.

    Args:
        model: The reward model at work.
        objective: Loss and metrics.
        held_out: All pairs of each set, by its name.
    """
    found = {}
    for name, batch in held_out.items():
        batch, scores = objective.weigh(batch), model.scores(batch)
        result = objective.loss(ModelOutput.of_scores(scores), batch, totals(batch))
        counted = scores[segment_sum(counted_tokens(batch), batch.cu_seqlens) > 0].double()
        scale = {names.REWARDS_MEAN: counted.mean(), names.REWARDS_STD: counted.std()}
        metrics = {names.LOSS_TOTAL: result.loss, **result.metrics, **scale}
        found |= {in_evaluation(name, metric): float(v) for metric, v in metrics.items()}
    return found
