import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
import torch

from rl_megatron.advantages import compute_advantages
from rl_megatron.errors import RolloutError
from rl_megatron.interfaces import metric_names as names
from rl_megatron.interfaces.records import Prompt, Rollout
from rl_megatron.parallel.layout import Layout
from rl_megatron.parallel.process import Process
from rl_megatron.rollout.requests import make_requests
from rl_megatron.runtime.rollout_batch import (
    group_ids,
    mask_truncated,
    mean_metrics,
    mini_batches,
    num_response_tokens,
    rollout_metrics,
    rollout_seed,
    score_together,
)
from rl_megatron.runtime.score import NamedReward
from tests.helpers.packed import packed, random_masks

ALONE = Process(Layout(), 0, torch.device("cpu"))


@dataclass
class Rank:
    """A rank among threads."""

    rank: int
    layout: Layout
    barrier: threading.Barrier
    given: dict = field(default_factory=dict)

    def gather(self, value):
        self.given[self.rank] = value
        self.barrier.wait(10)
        return [self.given[rank] for rank in range(self.layout.world_size)]


def on_ranks(world_size, job):
    """What `job(process)` returned or raised on each rank."""
    given, barrier = {}, threading.Barrier(world_size)

    def run(rank):
        try:
            return job(Rank(rank, Layout(data=world_size), barrier, given))
        except RolloutError as error:
            return error

    with ThreadPoolExecutor(world_size) as threads:
        return list(threads.map(run, range(world_size)))


def rollout(row_id, sample_index=0, length=3, finish_reason="stop"):
    prompt = Prompt(row_id, (1,), f"prompt {row_id}", "5")
    tokens = (1,) * length
    return Rollout(prompt, sample_index, tokens, (0.0,) * length, finish_reason, "text", 0)


def of_row(name="row", weight=1.0, calls=None):
    def values(rollouts):
        if calls is not None:
            calls.extend(r.prompt.row_id for r in rollouts)
        return [float(r.prompt.row_id) for r in rollouts]

    return NamedReward(name, weight, values)


def test_dt_06_a_row_that_stands_twice_in_a_batch_has_two_groups():
    prompts = [Prompt(row, (1,), "same text") for row in (7, 3, 7)]
    rollouts = [
        Rollout(r.prompt, r.sample_index, (1,), (0.0,), "stop", "", 0)
        for r in make_requests(prompts, group_size=2, seed=0)
    ]
    assert group_ids(rollouts, 2) == [0, 0, 1, 1, 2, 2]


def test_groups_are_found_wherever_their_members_stand():
    rollouts = [rollout(7, 3), rollout(3, 0), rollout(7, 0), rollout(7, 2), rollout(3, 1)]
    assert group_ids(rollouts, 2) == [0, 1, 2, 0, 1]


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_every_rollout_is_scored_once_and_told_to_all(world_size):
    calls = []
    rollouts = [rollout(row) for row in (4, 0, 9, 2, 5)]
    rewards = [of_row(calls=calls), of_row("twice", weight=0.5)]
    results = on_ranks(world_size, lambda process: score_together(rollouts, rewards, process))
    for scores in results:
        assert scores.rewards == (6.0, 0.0, 13.5, 3.0, 7.5)
        assert scores.by_name == {"row": (4.0, 0.0, 9.0, 2.0, 5.0)} | {
            "twice": (4.0, 0.0, 9.0, 2.0, 5.0)
        }
    assert sorted(calls) == [0, 2, 4, 5, 9]


def test_a_mistake_found_by_one_rank_stops_all():
    def wrong(rollouts):
        return [[1.0] if r.prompt.row_id == 1 else 1.0 for r in rollouts]

    rollouts, rewards = [rollout(0), rollout(1)], [NamedReward("mine", 1.0, wrong)]
    for error in on_ranks(2, lambda process: score_together(rollouts, rewards, process)):
        assert "rewards.mine: row 1, sample 0: the reward is [1.0] (list)" in str(error)


def test_nothing_scored_stops_the_run_and_something_does_not():
    def known(rollouts):
        return [1.0 if r.prompt.row_id == 1 else None for r in rollouts]

    rewards = [NamedReward("known", 1.0, known)]
    scores = score_together([rollout(0), rollout(1)], rewards, ALONE)
    assert scores.rewards == (None, 1.0)
    with pytest.raises(RolloutError, match="rewards: known gave None for all 2 responses"):
        score_together([rollout(0), rollout(2)], rewards, ALONE)


def test_mini_batches_take_every_sequence_once_in_an_order_of_the_key():
    batch = packed(random_masks(0, 12))
    batch = batch.with_fields(advantages=batch.sequence_ids[batch.segment_ids].float())

    def order(key):
        parts = list(mini_batches(batch, 4, key))
        assert [part.num_sequences for part in parts] == [4, 4, 4]
        for part in parts:
            # What belongs to a sequence has moved with it.
            assert torch.equal(part.advantages, part.sequence_ids[part.segment_ids].float())
        return torch.cat([part.sequence_ids for part in parts]).tolist()

    orders = [order(key) for key in ((0, 1, 0), (0, 1, 1), (0, 2, 0), (1, 1, 0))]
    assert all(sorted(found) == list(range(12)) for found in orders)
    assert len(set(map(tuple, orders))) == 4 and list(range(12)) not in orders
    assert order((0, 1, 0)) == orders[0]


def test_seeds_of_rollout_batches_differ_and_stay():
    seeds = {rollout_seed(seed, number) for seed in range(20) for number in range(1, 21)}
    assert len(seeds) == 400
    # Pinned: a resumed run on another machine must sample the same.
    assert rollout_seed(0, 1) == 5836529245451711556


def test_metrics_of_a_rollout_batch():
    rollouts = [rollout(1, 0, 2), rollout(1, 1, 4, "length"), rollout(2, 0, 6), rollout(2, 1, 8)]
    values = (1.0, 2.0, 3.0, None)
    scores = score_together(rollouts, [NamedReward("a", 2.0, lambda _: values)], ALONE)
    advantages = compute_advantages(scores.rewards, [0, 0, 1, 1], 2, adv_estimator="grpo")
    assert rollout_metrics(rollouts, scores, advantages) == {
        names.REWARD_MEAN: 4.0,
        names.REWARD_STD: 2.0,  # of 2, 4, 6
        "reward/a": 2.0,
        names.ROLLOUT_RESPONSE_TOKENS: 5.0,
        names.ROLLOUT_TRUNCATED: 0.25,
        names.ROLLOUT_UNSCORED: 1.0,
        names.ROLLOUT_ZERO_VARIANCE: 0.5,  # a reward alone teaches nothing
    }


def test_metrics_of_several_steps_are_means_and_maxima():
    steps = [{"loss/total": 1.0, "policy/ratio_max": 4.0}]
    steps.append({"loss/total": 3.0, "policy/ratio_max": 1.5})
    assert mean_metrics(steps) == {"loss/total": 2.0, "policy/ratio_max": 4.0}


def test_cut_responses_are_masked_and_counted():
    batch = packed([[0, 1, 1], [0, 1], [0, 1, 1]])
    rollouts = [rollout(1, 0, 2), rollout(1, 1, 1, "length"), rollout(2, 0, 2, "length")]
    same, metrics = mask_truncated(batch, rollouts, masked=False)
    assert torch.equal(same.response_mask, batch.response_mask)
    assert metrics == {names.ROLLOUT_MASKED: 0.0}
    masked, metrics = mask_truncated(batch, rollouts, masked=True)
    assert masked.response_mask.tolist() == [False, True, True] + [False] * 5
    assert metrics == {names.ROLLOUT_MASKED: 2.0}
    assert num_response_tokens(batch) == [2, 1, 2]
    assert num_response_tokens(masked) == [2, 0, 0]


def test_refills_have_seeds_of_their_own():
    seeds = {rollout_seed(0, number, refill) for number in range(1, 9) for refill in range(9)}
    assert len(seeds) == 72
    assert rollout_seed(0, 1, 0) == rollout_seed(0, 1)
