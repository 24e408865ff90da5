from collections import Counter
from contextlib import contextmanager, nullcontext

import pytest
import torch

from rl_megatron.config.rollout import DynamicSamplingConfig, RolloutConfig
from rl_megatron.data.sampler import PositionSampler, RowCursor
from rl_megatron.errors import RolloutError
from rl_megatron.interfaces.records import Prompt, Rollout, Sampling
from rl_megatron.metrics.timing import Span
from rl_megatron.parallel.layout import Layout
from rl_megatron.parallel.process import Process
from rl_megatron.rollout.requests import make_requests
from rl_megatron.runtime.groups import GroupSampler
from rl_megatron.runtime.rollout_batch import rollout_seed
from rl_megatron.runtime.score import NamedReward

GROUP_SIZE = 2
REFILLS, REPLACED = "rollout/refills", "rollout/replaced_groups"
DRAWN_REWARD = "rollout/drawn_reward_mean"


class Engine:
    """Answers with the key of the random numbers that it would have drawn from."""

    def __init__(self):
        self.calls = []
        self.versions = []

    def sampling(self, policy_version):
        self.versions.append(policy_version)
        return nullcontext(self)

    def generate(self, prompts, sampling, group_size, seed):
        self.calls.append(([prompt.row_id for prompt in prompts], seed))
        return [
            Rollout(r.prompt, r.sample_index, (1, 2), (0.0, 0.0), "stop", str(r.key), 0)
            for r in make_requests(prompts, group_size, seed)
        ]


@contextmanager
def untimed(name):
    yield Span()


def of_rollouts(value):
    return lambda rollouts: [value(r.prompt.row_id, r.sample_index % GROUP_SIZE) for r in rollouts]


def sampler(engine, values, *, wanted=4, num_rows=1000, by=None, weights=(1.0,), **dynamic):
    """Rows in order 0, 1, 2, ...; `values` are functions of (row, sample)."""
    rewards = [
        NamedReward(name, weight, of_rollouts(value))
        for (name, value), weight in zip(values.items(), weights, strict=True)
    ]
    config = RolloutConfig(
        prompts_per_batch=wanted,
        group_size=GROUP_SIZE,
        dynamic_sampling=DynamicSamplingConfig(reward=by, **dynamic) if dynamic or by else None,
    )
    return GroupSampler(
        engine,
        rewards,
        [Prompt(row, (1,), f"prompt {row}") for row in range(num_rows)],
        RowCursor(PositionSampler(num_rows, 0, shuffle=False), "digest"),
        Sampling(temperature=1.0, max_response_tokens=4, stop_token_ids=(2,)),
        config,
        seed=5,
        process=Process(Layout(), 0, torch.device("cpu")),
    )


def rows(sampled):
    return [rollout.prompt.row_id for rollout in sampled.rollouts[::GROUP_SIZE]]


def differs_in_every_third(row, sample):
    return float(sample) if row % 3 == 0 else 1.0


def test_without_dynamic_sampling_prompts_come_as_they_are():
    engine = Engine()
    groups = sampler(engine, {"same": lambda row, sample: 0.5})
    first, second = (groups.sample(number, untimed, policy_version=3) for number in (1, 2))
    assert rows(first) == [0, 1, 2, 3] and rows(second) == [4, 5, 6, 7]
    assert first.group_ids == [0, 0, 1, 1, 2, 2, 3, 3]
    assert first.scores.rewards == (0.5,) * 8
    assert first.metrics == {}
    assert groups.cursor.position == 8
    assert [seed for _, seed in engine.calls] == [rollout_seed(5, 1), rollout_seed(5, 2)]
    assert engine.versions == [3, 3]


def test_equal_groups_are_replaced_by_further_prompts_in_order():
    engine = Engine()
    groups = sampler(engine, {"a": differs_in_every_third}, max_refills=5)
    sampled = groups.sample(1, untimed, policy_version=3)
    assert rows(sampled) == [0, 3, 6, 9]
    assert sampled.group_ids == [0, 0, 1, 1, 2, 2, 3, 3]
    assert sampled.scores.rewards == (0.0, 1.0) * 4
    assert sampled.scores.by_name == {"a": (0.0, 1.0) * 4}
    # 2 of 4 differed, so 4 more are drawn for the 2 that miss; then 3 of 8 for 1: 3 more.
    assert [drawn for drawn, _ in engine.calls] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    assert len({seed for _, seed in engine.calls}) == 3
    # Prompt 10 is not needed, and is the first of the next batch.
    assert groups.cursor.position == 10
    assert sampled.metrics == {
        REFILLS: 2.0,
        REPLACED: 6.0,
        DRAWN_REWARD: pytest.approx((4 * 0.5 + 6) / 10),
    }
    again = groups.sample(2, untimed, policy_version=3)
    assert engine.calls[3][0][0] == 10
    assert rows(again) == [12, 15, 18, 21]


def test_a_batch_that_is_full_at_once_draws_nothing_more():
    engine = Engine()
    groups = sampler(engine, {"a": lambda row, sample: float(sample)}, max_refills=1)
    sampled = groups.sample(1, untimed, policy_version=3)
    assert rows(sampled) == [0, 1, 2, 3] and len(engine.calls) == 1
    assert sampled.metrics == {REFILLS: 0.0, REPLACED: 0.0, DRAWN_REWARD: 0.5}


def test_one_reward_alone_may_decide():
    values = {"right": differs_in_every_third, "length": lambda row, sample: 0.1 * sample}
    groups = sampler(Engine(), values, by="right", weights=(1.0, 1.0), max_refills=5)
    assert rows(groups.sample(1, untimed, policy_version=3)) == [0, 3, 6, 9]
    by_sum = sampler(Engine(), values, weights=(1.0, 1.0), max_refills=5)
    assert rows(by_sum.sample(1, untimed, policy_version=3)) == [0, 1, 2, 3]


def test_groups_with_fewer_than_two_different_scored_rewards_are_replaced():
    def sometimes(row, sample):
        if row == 0:
            return None  # nothing scored
        if row == 1:
            return None if sample else 1.0  # one alone
        return float(sample)

    sampled = sampler(Engine(), {"a": sometimes}, wanted=2, max_refills=3).sample(
        1, untimed, policy_version=3
    )
    assert rows(sampled) == [2, 3]
    assert sampled.metrics[DRAWN_REWARD] == pytest.approx((1 + 0 + 1 + 0 + 1) / 5)


def test_a_row_that_comes_again_in_a_refill_is_another_group_with_other_samples():
    def only_later(row, sample):
        only_later.seen[row] += 1
        return float(sample) if only_later.seen[row] > GROUP_SIZE else 0.0

    only_later.seen = Counter()
    engine = Engine()
    groups = sampler(engine, {"a": only_later}, wanted=2, num_rows=2, max_refills=1)
    sampled = groups.sample(1, untimed, policy_version=3)
    assert [drawn for drawn, _ in engine.calls] == [[0, 1], [0, 1]]
    assert sampled.group_ids == [0, 0, 1, 1]
    first_keys = {
        str(r.key)
        for r in make_requests([Prompt(0, (1,), ""), Prompt(1, (1,), "")], 2, engine.calls[0][1])
    }
    assert not first_keys & {rollout.text for rollout in sampled.rollouts}


def test_a_batch_that_never_fills_names_the_setting_and_what_was_seen():
    def hopeless(row, sample):
        if row % 5 == 4:
            return None
        return float(sample) if row == 6 else float(row % 5 == 0)

    engine = Engine()
    groups = sampler(engine, {"a": hopeless}, max_refills=2)
    with pytest.raises(RolloutError) as error:
        groups.sample(3, untimed, policy_version=3)
    assert len(engine.calls) == 3
    assert str(error.value) == (
        "rollout.dynamic_sampling.max_refills = 2: rollout batch 3 has 1 of 4 groups whose rewards "
        "(their sum) differ after 12 prompts; of the other groups 6 have 0 throughout, 3 have 1 "
        "throughout, 2 have no reward. Take prompts that are neither too hard nor too easy, raise "
        "rollout.group_size or max_refills, or set rollout.dynamic_sampling=null"
    )


def test_nothing_scored_stops_a_run_without_dynamic_sampling():
    groups = sampler(Engine(), {"a": lambda row, sample: None})
    with pytest.raises(RolloutError, match="rewards: a gave None for all 8 responses"):
        groups.sample(1, untimed, policy_version=3)


def test_phases_are_timed_in_every_refill():
    phases = []

    @contextmanager
    def phase(name):
        span = Span()
        yield span
        phases.append((name, span.tokens))

    sampler(Engine(), {"a": differs_in_every_third}, wanted=2, max_refills=3).sample(
        1, phase, policy_version=3
    )
    assert phases == [("generate", 8), ("score", 0), ("generate", 8), ("score", 0)]
