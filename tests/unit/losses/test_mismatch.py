import math

import pytest
import torch

from rl_megatron.losses.mismatch import rollout_mismatch


def test_mismatch_by_hand():
    old = torch.tensor([math.nan, -1.0, -2.0, -3.0])
    rollout = torch.tensor([0.0, -1.0, -1.5, -3.25])
    mask = torch.tensor([False, True, True, True])
    # Differences 0, -0.5, 0.25: k3 0, exp(-0.5) - 0.5, exp(0.25) - 1.25.
    assert rollout_mismatch(old, rollout, mask) == {
        "rollout/mismatch_kl": pytest.approx((0.106530660 + 0.034025417) / 3),
        "rollout/mismatch_max_abs": 0.5,
    }


def test_equal_logprobs_have_none():
    logprobs = torch.tensor([-1.0, -2.0])
    result = rollout_mismatch(logprobs, logprobs, torch.tensor([True, True]))
    assert set(result.values()) == {0.0}


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_nothing_valid(num_tokens):
    logprobs = torch.full((num_tokens,), math.nan)
    result = rollout_mismatch(logprobs, logprobs, torch.zeros(num_tokens, dtype=torch.bool))
    assert set(result.values()) == {0.0}


def test_one_wild_token_is_seen():
    old, rollout = torch.full((100,), -1.0), torch.full((100,), -1.0)
    old[42] = -9.0
    result = rollout_mismatch(old, rollout, torch.ones(100, dtype=torch.bool))
    assert result["rollout/mismatch_max_abs"] == 8.0
    assert result["rollout/mismatch_kl"] == pytest.approx((math.exp(-8) + 7) / 100)
