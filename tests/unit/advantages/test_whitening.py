import math
import statistics

import pytest
import torch

from rl_megatron.advantages import compute_advantages, with_advantages
from rl_megatron.advantages.whitening import reward_itself, whiten
from tests.helpers.packed import packed

BOTH = ["reinforce_plus_plus", "reinforce_plus_plus_baseline"]


def whitened(values, counts=None, adv_eps=0.0):
    values = torch.tensor(values, dtype=torch.float64)
    counts = torch.ones(len(values)) if counts is None else torch.tensor(counts)
    return whiten(values, counts, adv_eps).tolist()


def test_grpo_10_unbiased():
    expected = [-1.161895, -0.387298, 0.387298, 1.161895]
    assert whitened([1, 2, 3, 4]) == pytest.approx(expected, abs=1e-6)


def test_each_value_counts_as_often_as_it_has_tokens():
    values, counts = [0.3, -1.0, 2.0, 0.5], [3, 1, 4, 2]
    tokens = [v for v, n in zip(values, counts, strict=True) for _ in range(n)]
    mean, std = statistics.fmean(tokens), statistics.stdev(tokens)
    expected = [(v - mean) / (std + 1e-4) for v in values]
    assert whitened(values, counts, 1e-4) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("left_out", [5.0, -1e30, math.nan, math.inf])
def test_what_counts_nothing_changes_nothing(left_out):
    with_it = whitened([1.0, left_out, 3.0], [2, 0, 1])
    assert with_it == [whitened([1.0, 3.0], [2, 1])[0], 0.0, whitened([1.0, 3.0], [2, 1])[1]]


@pytest.mark.parametrize(
    ("values", "counts"),
    [([0.9] * 8, [1, 2, 3, 4, 5, 6, 7, 8]), ([0.7], [4]), ([0.7, 0.1], [4, 0]), ([], [])],
)
def test_grpo_04_equal_values_give_exactly_0(values, counts):
    assert whitened(values, counts, 1e-6) == [0.0] * len(values)


def test_reward_itself_is_another_tensor():
    rewards = torch.tensor([1.0, 2.0])
    result = reward_itself(rewards, 1e-4)
    assert torch.equal(result, rewards) and result is not rewards


def test_reinforce_plus_plus_by_hand():
    # Rewards of two prompts; responses of 1, 2, 1 and 4 tokens: the mean is 9/8 over 8 tokens.
    rewards, num_tokens = [3.0, 1.0, 0.0, 1.0], [1, 2, 1, 4]
    squares = 1 * 1.875**2 + 2 * 0.125**2 + 1 * 1.125**2 + 4 * 0.125**2
    std = math.sqrt(squares / 7)
    result = compute_advantages(
        rewards,
        [0, 0, 1, 1],
        2,
        adv_estimator="reinforce_plus_plus",
        adv_eps=0.0,
        num_tokens=num_tokens,
    )
    expected = [1.875 / std, -0.125 / std, -1.125 / std, -0.125 / std]
    assert result.values.tolist() == pytest.approx(expected, rel=1e-6)
    assert result.values.dtype == torch.float32


def test_reinforce_plus_plus_baseline_by_hand():
    # Minus the groups' means 2 and 0.5: 1, -1, -0.5, 0.5; over 1, 2, 1 and 4 tokens the sum is 0.5.
    centred, num_tokens = [1.0, -1.0, -0.5, 0.5], [1, 2, 1, 4]
    tokens = [v for v, n in zip(centred, num_tokens, strict=True) for _ in range(n)]
    result = compute_advantages(
        [3.0, 1.0, 0.0, 1.0],
        [0, 0, 1, 1],
        2,
        adv_estimator="reinforce_plus_plus_baseline",
        adv_eps=1e-3,
        num_tokens=num_tokens,
    )
    mean, std = 0.0625, statistics.stdev(tokens)
    expected = [(v - mean) / (std + 1e-3) for v in centred]
    assert result.values.tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("adv_estimator", BOTH)
def test_tokens_of_the_batch_have_mean_0_and_deviation_1(adv_estimator):
    batch = packed([[0, 1, 1, 1], [0, 0, 1], [0, 1], [0, 1, 1]])
    result = compute_advantages(
        [1.0, 0.0, 0.5, 0.0],
        [4, 4, 2, 2],
        2,
        adv_estimator=adv_estimator,
        adv_eps=1e-9,
        num_tokens=[3, 1, 1, 2],
    )
    batch = with_advantages(batch, result)
    tokens = batch.advantages[batch.response_mask].double()
    assert float(tokens.mean()) == pytest.approx(0, abs=1e-7)
    assert float(tokens.std(correction=1)) == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("adv_estimator", BOTH)
@pytest.mark.parametrize("missing", [None, math.nan])
def test_rw_07_missing_reward_takes_part_in_nothing(adv_estimator, missing):
    settings = {"adv_estimator": adv_estimator, "adv_eps": 0.0}
    with_it = compute_advantages(
        [1.0, 0.0, missing, 0.0, 0.5, 2.0], [0] * 3 + [1] * 3, 3, num_tokens=[2] * 6, **settings
    )
    # A group of two in place of the group of three: the same statistics.
    without = compute_advantages([1.0, 0.0, 0.0, 0.5], [0, 0, 1, 1], 2, **settings)
    assert with_it.excluded.tolist() == [False, False, True, False, False, False]
    assert with_it.values[2] == 0
    assert without.values[0] > 0
    values = {
        "reinforce_plus_plus": [1.0, 0.0, 0.0, 0.5, 2.0],
        "reinforce_plus_plus_baseline": [0.5, -0.5, -2.5 / 3, 0.5 - 2.5 / 3, 2 - 2.5 / 3],
    }[adv_estimator]
    tokens = values + values
    mean, std = statistics.fmean(tokens), statistics.stdev(tokens)
    found = with_it.values[[0, 1, 3, 4, 5]].tolist()
    assert found == pytest.approx([(v - mean) / std for v in values], rel=1e-6, abs=1e-7)


def test_one_response_per_prompt_is_enough_without_a_baseline():
    result = compute_advantages(
        [1.0, 0.0], [0, 1], 1, adv_estimator="reinforce_plus_plus", adv_eps=0.0
    )
    assert result.values.tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)])


def test_the_clamp_comes_after_whitening():
    result = compute_advantages(
        [100.0, 0.0, 0.0, 0.0],
        [0, 0, 1, 1],
        2,
        adv_estimator="reinforce_plus_plus",
        adv_eps=0.0,
        adv_clip=1.0,
    )
    assert result.values.tolist() == pytest.approx([1.0, -0.5, -0.5, -0.5])
