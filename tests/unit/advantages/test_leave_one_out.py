import statistics

import pytest
import torch

from rl_megatron.advantages.leave_one_out import leave_one_out


def test_grpo_04_the_odd_one_out():
    rewards = torch.tensor([0.4] * 7 + [1.0], dtype=torch.float64)
    advantages = leave_one_out(rewards, 1e-4).tolist()
    assert advantages[:7] == pytest.approx([-0.085714] * 7, abs=1e-6)
    assert advantages[7] == pytest.approx(0.6)


def test_against_the_mean_of_the_others():
    rewards = torch.randn(6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values = rewards.tolist()
    others = [statistics.fmean(values[:i] + values[i + 1 :]) for i in range(6)]
    expected = [value - other for value, other in zip(values, others, strict=True)]
    assert leave_one_out(rewards, 1e-4).tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("num_rewards", [1, 2, 8])
def test_equal_rewards_and_a_reward_alone_give_exactly_zero(num_rewards):
    rewards = torch.full((num_rewards,), 0.9, dtype=torch.float32).double()
    assert leave_one_out(rewards, 1e-4).tolist() == [0.0] * num_rewards
