import inspect
import math
from typing import get_args, get_type_hints

import pytest
import torch

from rl_megatron.advantages import ADVANTAGES, compute_advantages, to_tokens, with_advantages
from rl_megatron.advantages.groups import WHITENED
from rl_megatron.config.algorithm import AlgorithmConfig
from rl_megatron.errors import ConfigError, RolloutError
from rl_megatron.losses import aggregation_weights, totals
from tests.helpers.packed import packed

# What whitens looks at the whole batch; see test_whitening.py.
WITHIN_GROUPS = [name for name in ADVANTAGES if name not in WHITENED]


def mean_centred(rewards, group_ids, group_size):
    rewards = [float(reward) for reward in rewards]
    result = compute_advantages(rewards, group_ids, group_size, adv_estimator="dr_grpo")
    return result.values.tolist()


@pytest.mark.parametrize("adv_estimator", ADVANTAGES)
def test_grpo_04_eight_equal_rewards(adv_estimator):
    result = compute_advantages([0.9] * 8, [3] * 8, 8, adv_estimator=adv_estimator, adv_eps=1e-6)
    assert result.values.tolist() == [0.0] * 8
    assert (result.num_groups, result.num_zero_variance_groups) == (1, 1)


@pytest.mark.parametrize("adv_estimator", WITHIN_GROUPS)
def test_grpo_05_one_valid_reward_in_a_group(adv_estimator):
    result = compute_advantages([0.7, None], [3, 3], 2, adv_estimator=adv_estimator)
    assert result.values.tolist() == [0.0, 0.0]
    assert result.excluded.tolist() == [False, True]
    assert (result.num_groups, result.num_zero_variance_groups) == (1, 1)


@pytest.mark.parametrize("adv_estimator", WITHIN_GROUPS)
def test_grpo_05_zero_variance_is_of_the_groups_own_rewards(adv_estimator):
    result = compute_advantages([1.0, 1.0, 0.0, 1.0], [0, 0, 1, 1], 2, adv_estimator=adv_estimator)
    assert result.num_zero_variance_groups == 1
    assert result.values[:2].tolist() == [0.0, 0.0]
    assert result.values[2] < 0 < result.values[3]


@pytest.mark.parametrize("adv_estimator", ["grpo", "rloo", "reinforce_plus_plus_baseline"])
def test_grpo_05_group_size_1_is_refused(adv_estimator):
    with pytest.raises(ConfigError, match=r"rollout\.group_size: 1 .* 2 or more"):
        compute_advantages([1.0], [0], 1, adv_estimator=adv_estimator)


@pytest.mark.parametrize("missing", [None, math.nan])
def test_rw_07_missing_reward_takes_part_in_nothing(missing):
    result = compute_advantages(
        [1.0, 0.0, missing, 1.0], [5] * 4, 4, adv_estimator="grpo", adv_eps=0.0
    )
    assert result.values.tolist() == pytest.approx([0.577350, -1.154701, 0, 0.577350], abs=1e-6)
    assert result.excluded.tolist() == [False, False, True, False]


def test_rw_07_excluded_rollout_is_masked_from_the_loss():
    batch = packed([[0, 1, 1], [0, 1], [0, 1, 1, 1], [0, 1]])
    result = compute_advantages([1.0, 0.0, None, 1.0], [5] * 4, 4, adv_estimator="dr_grpo")
    batch = with_advantages(batch, result)
    expected = [0, 1, 1, 0, -2, 0, 0, 0, 0, 0, 1]
    assert (3 * batch.advantages).tolist() == pytest.approx(expected)
    assert batch.response_mask.tolist() == [bool(x) for x in [0, 1, 1, 0, 1, 0, 0, 0, 0, 0, 1]]
    assert totals(batch).num_sequences == 3
    weights = aggregation_weights(batch.cu_seqlens, batch.response_mask, "token-mean")
    assert weights.tolist() == [0, 0.25, 0.25, 0, 0.25, 0, 0, 0, 0, 0, 0.25]


def test_rw_07_group_without_any_reward_is_skipped():
    result = compute_advantages(
        [None, None, 1.0, 0.0], [0, 0, 1, 1], 2, adv_estimator="grpo", adv_eps=0.0
    )
    assert result.values[:2].tolist() == [0.0, 0.0]
    assert result.values[2:].tolist() == pytest.approx([0.707107, -0.707107], abs=1e-6)
    assert result.excluded.tolist() == [True, True, False, False]
    assert (result.num_groups, result.num_zero_variance_groups) == (1, 0)


@pytest.mark.parametrize("reward", [math.inf, -math.inf])
def test_infinite_reward_is_refused(reward):
    with pytest.raises(RolloutError, match=r"rollout 1 \(prompt row 9\).*inf.*finite"):
        compute_advantages([0.0, reward], [9, 9], 2, adv_estimator="grpo")


def test_dt_06_rows_of_equal_text_stay_apart_and_siblings_together():
    # Rows p (0) and p' (1) have the same text; the samples of row s (2) have different prompts.
    assert mean_centred([1, 0, 0, 0, 1, 0], [0, 0, 1, 1, 2, 2], 2) == [0.5, -0.5, 0, 0, 0.5, -0.5]


def test_ro_06_groups_are_formed_by_id_in_any_order():
    # Completed in the order B2 A0 A2 B0 B1 A1, rewards A [1, 0, 1], B [0, 0, 0].
    values = mean_centred([0, 1, 1, 0, 0, 0], [1, 0, 0, 1, 1, 0], 3)
    assert values == pytest.approx([0, 1 / 3, 1 / 3, 0, 0, -2 / 3])


@pytest.mark.parametrize("group_ids", [[0, 0, 0, 1], [0, 1, 2, 3], [0, 0, 0, 0]])
def test_ro_06_groups_of_another_size_are_refused(group_ids):
    with pytest.raises(RolloutError, match=r"prompt row 0 has \d rollouts.*group_size is 2"):
        mean_centred([0, 1, 0, 1], group_ids, 2)


def test_one_reward_per_rollout():
    with pytest.raises(AssertionError, match="one group id per reward"):
        mean_centred([0, 1], [0, 0, 0], 3)


def test_an_empty_rollout_batch():
    result = compute_advantages([], [], 4, adv_estimator="grpo")
    assert result.values.shape == (0,)
    assert (result.num_groups, result.num_zero_variance_groups) == (0, 0)


def test_advantages_are_clamped_on_both_sides():
    rewards = [0.0, 3.0, -3.0, 0.5]
    result = compute_advantages(rewards, [0] * 4, 4, adv_estimator="dr_grpo", adv_clip=1.0)
    assert result.values.tolist() == pytest.approx([-0.125, 1.0, -1.0, 0.375])


def test_eps_is_added_to_the_std():
    result = compute_advantages([1.0, 0.0], [0, 0], 2, adv_estimator="grpo", adv_eps=0.5)
    assert result.values.tolist() == pytest.approx([0.414214, -0.414214], abs=1e-6)


def test_unknown_estimator_is_refused():
    with pytest.raises(ConfigError, match=r"adv_estimator: 'gae'.*grpo, dr_grpo, rloo"):
        compute_advantages([1.0, 0.0], [0, 0], 2, adv_estimator="gae")


def test_to_tokens_fills_responses_only():
    batch = packed([[0, 1, 1], [0, 0, 1, 0]])
    tokens = to_tokens(torch.tensor([0.5, -2.0]), batch)
    assert tokens.tolist() == [0, 0.5, 0.5, 0, 0, -2.0, 0]
    assert tokens.dtype == torch.float32


def test_estimators_and_defaults_are_those_of_the_configuration():
    assert set(get_args(get_type_hints(AlgorithmConfig)["adv_estimator"])) == set(ADVANTAGES)
    parameters = inspect.signature(compute_advantages).parameters
    config = AlgorithmConfig()
    assert parameters["adv_eps"].default == config.adv_eps
    assert parameters["adv_clip"].default == config.adv_clip
