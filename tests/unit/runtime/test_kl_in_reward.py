import pytest

from rl_megatron.config.algorithm import AdaptiveKLConfig, AlgorithmConfig
from rl_megatron.interfaces import metric_names as names
from rl_megatron.runtime.kl_in_reward import KLInReward
from tests.helpers.packed import packed

# KL of the sequences by k1, on response tokens: 0.5 + 0.25 = 0.75, and 0.25.
BATCH = packed(
    [[0, 1, 1], [0, 1]],
    old_logprobs=[9.0, -1.0, -1.0, 9.0, -0.5],
    ref_logprobs=[0.0, -1.5, -1.25, 0.0, -0.75],
)


def test_switched_off_it_changes_nothing():
    off = KLInReward(AlgorithmConfig())
    assert off.apply([1.0, None], packed([[0, 1], [0, 1]])) == ([1.0, None], {})


def test_the_penalty_is_per_response():
    fixed = KLInReward(AlgorithmConfig(use_kl_in_reward=True, kl_coef=0.2))
    for _ in range(2):
        rewards, metrics = fixed.apply([1.0, None], BATCH)
        assert rewards == [pytest.approx(1.0 - 0.2 * 0.75), None]
        assert metrics == {names.REWARD_KL: 0.5, names.REWARD_KL_COEF: 0.2}


def test_the_estimator_is_the_one_that_was_asked_for():
    k2 = KLInReward(AlgorithmConfig(use_kl_in_reward=True, kl_coef=1.0, kl_estimator="k2"))
    rewards, _ = k2.apply([0.0, 0.0], BATCH)
    assert rewards == pytest.approx([-(0.25 + 0.0625) / 2, -0.0625 / 2])


def test_an_adaptive_coefficient_moves_after_the_batch_it_was_used_on():
    control = AdaptiveKLConfig(type="adaptive", target_kl=0.1, ema_decay=0.0)
    adaptive = KLInReward(AlgorithmConfig(use_kl_in_reward=True, kl_coef=0.2, kl_ctrl=control))
    coefficients = [adaptive.apply([0.0, 0.0], BATCH)[1][names.REWARD_KL_COEF] for _ in range(3)]
    assert coefficients == pytest.approx([0.2, 0.22, 0.242])
    assert adaptive.state_dict() == {"kl_coef": pytest.approx(0.2662), "ema_kl": 0.5}
