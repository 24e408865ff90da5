import statistics

import pytest
import torch

from rl_megatron.advantages.group_relative import group_mean_centred, group_z_score


def float64(values):
    return torch.tensor(values, dtype=torch.float64)


def test_z_score_by_hand():
    # Mean 0.5, unbiased std sqrt(4 * 0.25 / 3) = 0.577350.
    advantages = group_z_score(float64([1.0, 0.0, 0.0, 1.0]), 1e-4)
    size = 0.5 / (0.577350269 + 1e-4)
    assert advantages.tolist() == pytest.approx([size, -size, -size, size])


@pytest.mark.parametrize("seed", range(3))
def test_against_the_statistics_module(seed):
    rewards = torch.randn(7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    values = rewards.tolist()
    mean, std = statistics.fmean(values), statistics.stdev(values)
    assert group_z_score(rewards, 1e-3).tolist() == pytest.approx(
        [(v - mean) / (std + 1e-3) for v in values], rel=1e-12
    )
    assert group_mean_centred(rewards, 1e-3).tolist() == pytest.approx(
        [v - mean for v in values], rel=1e-12
    )


@pytest.mark.parametrize("estimator", [group_z_score, group_mean_centred])
@pytest.mark.parametrize("reward", [0.9, 0.1, 1 / 3, 1e8, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_grpo_04_equal_rewards_give_exactly_zero(estimator, reward, dtype):
    rewards = torch.full((8,), reward, dtype=dtype).double()
    assert estimator(rewards, 1e-6).tolist() == [0.0] * 8


@pytest.mark.parametrize("estimator", [group_z_score, group_mean_centred])
def test_grpo_05_one_reward_alone_gives_zero(estimator):
    assert estimator(float64([0.7]), 1e-4).tolist() == [0.0]
