"""What happens to rollouts between the engine and the update, on all ranks together."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from rl_megatron.advantages import Advantages
from rl_megatron.errors import RLMegatronError, RolloutError
from rl_megatron.interfaces import metric_names as names
from rl_megatron.interfaces.batch import PackedBatch
from rl_megatron.interfaces.records import Rollout
from rl_megatron.losses.sums import segment_sum
from rl_megatron.parallel.process import Process
from rl_megatron.runtime.score import NamedReward, Scores, Values, add_up, values_of


def rollout_seed(seed: int, number: int, refill: int = 0) -> int:
    """The seed of all sampling of rollout batch `number` of a run.

    Refills have seeds of their own: a row that comes again in one must not answer the same.
    """
    key = (seed, number, refill) if refill else (seed, number)
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0])


def score_together(
    rollouts: Sequence[Rollout], rewards: Sequence[NamedReward], process: Process
) -> Scores:
    """As `gather_scores`, of which at least one rollout must be scored."""
    scores = gather_scores(rollouts, rewards, process)
    require_scores(scores)
    return scores


def gather_scores(
    rollouts: Sequence[Rollout], rewards: Sequence[NamedReward], process: Process
) -> Scores:
    """The scores of all rollouts, each computed by one rank and told to the others; those of a
    model by all ranks together.

    A reward may depend on a clock (a deadline) or on a user's code: computed on every rank it
    could differ, and ranks that disagree about an advantage train different models.

    Raises:
        RolloutError: A reward is no number.
    """
    mine = rollouts[process.rank :: process.layout.world_size]
    result: dict[str, Values] | RLMegatronError
    try:
        result = {r.name: values_of(r, mine) for r in rewards if not r.together}
    except RLMegatronError as error:
        result = error
    shares: list[dict[str, Values]] = []
    for share in process.gather(result):
        if isinstance(share, RLMegatronError):
            raise share
        shares.append(share)
    by_name = {
        name: _interleave([share[name] for share in shares], len(rollouts)) for name in shares[0]
    }
    by_name |= {r.name: values_of(r, rollouts) for r in rewards if r.together}
    return add_up(by_name, rewards)


def require_scores(scores: Scores) -> None:
    """Raise RolloutError if there are rollouts and not one could be scored."""
    if scores.rewards and scores.num_unscored == len(scores.rewards):
        raise RolloutError(
            f"rewards: {', '.join(scores.by_name)} gave None for all {len(scores.rewards)} "
            "responses, so there is nothing to learn from; return a number where a response can "
            "be scored"
        )


def _interleave(shares: Sequence[Values], total: int) -> Values:
    return tuple(shares[i % len(shares)][i // len(shares)] for i in range(total))


def group_ids(rollouts: Sequence[Rollout], group_size: int) -> list[int]:
    """The group of each rollout: its prompt row, and which of the row's groups in this batch.

    A row that stands twice in a batch (at the end of one epoch and the start of the next) has two
    groups; its sample indices go on from the first to the second.
    """
    identities = [(r.prompt.row_id, r.sample_index // group_size) for r in rollouts]
    number = {identity: index for index, identity in enumerate(dict.fromkeys(identities))}
    return [number[identity] for identity in identities]


def mask_truncated(
    batch: PackedBatch, rollouts: Sequence[Rollout], masked: bool
) -> tuple[PackedBatch, dict[str, float]]:
    """The batch, if `masked` without the tokens of responses that were cut, and how many are gone.

    Overlong filtering of DAPO (arXiv 2503.14476, section 3.4): how a response would have gone on is
    not known, so neither is whether it deserved its reward.
    """
    assert len(rollouts) == batch.num_sequences, "one rollout per sequence"
    cut = torch.tensor([masked and r.finish_reason == "length" for r in rollouts], dtype=torch.bool)
    mask = batch.response_mask & ~cut[batch.segment_ids]
    return batch.with_fields(response_mask=mask), {names.ROLLOUT_MASKED: float(cut.sum())}


def num_response_tokens(batch: PackedBatch) -> list[int]:
    """Tokens of each sequence that are trained on."""
    return [int(n) for n in segment_sum(batch.response_mask, batch.cu_seqlens)]


def mini_batches(batch: PackedBatch, size: int, key: Sequence[int]) -> Iterator[PackedBatch]:
    """The batch in mini-batches of `size` sequences, in an order drawn from `key` alone."""
    draws = np.random.Philox(np.random.SeedSequence(key)).random_raw(batch.num_sequences)
    order = np.argsort(draws, kind="stable").tolist()
    for start in range(0, len(order), size):
        yield batch.select(order[start : start + size])


def rollout_metrics(
    rollouts: Sequence[Rollout], scores: Scores, advantages: Advantages
) -> dict[str, float]:
    """Rewards and lengths of a rollout batch."""
    scored = [reward for reward in scores.rewards if reward is not None]
    lengths = [len(rollout.response_ids) for rollout in rollouts]
    return {
        names.REWARD_MEAN: statistics.fmean(scored),
        names.REWARD_STD: statistics.stdev(scored) if len(scored) > 1 else 0.0,
        **{f"reward/{name}": mean for name, mean in scores.means.items()},
        names.ROLLOUT_RESPONSE_TOKENS: statistics.fmean(lengths),
        names.ROLLOUT_TRUNCATED: sum(r.finish_reason == "length" for r in rollouts) / len(rollouts),
        names.ROLLOUT_UNSCORED: float(scores.num_unscored),
        names.ROLLOUT_ZERO_VARIANCE: (
            advantages.num_zero_variance_groups / max(advantages.num_groups, 1)
        ),
    }


def mean_metrics(updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of each metric over the optimiser steps of a rollout batch; maxima are maxima."""
    combined = {}
    for name in updates[0]:
        values = [update[name] for update in updates]
        combined[name] = max(values) if name.endswith("_max") else statistics.fmean(values)
    return combined
