import inspect
import math
from typing import get_args, get_type_hints

import pytest
import torch

from rl_megatron.config.algorithm import AlgorithmConfig
from rl_megatron.errors import ConfigError
from rl_megatron.losses import correct_for_rollout, grpo_objective
from rl_megatron.losses.grpo import LOSS_MODES
from rl_megatron.losses.rollout_is import (
    ROLLOUT_IS,
    ROLLOUT_IS_LEVELS,
    bounded_weights,
    importance_weights,
    sequence_importance_weights,
)
from tests.helpers.packed import packed, random_masks, run_objective

MEAN, MAX = "rollout/is_weight_mean", "rollout/is_weight_max"
BOUNDED, EFFECTIVE = "rollout/is_bounded_fraction", "rollout/is_effective_sample_fraction"

# Weights old / rollout of the response tokens: 4, 0.25, 1 and 0.5, 1.2.
MASKS = [[0, 1, 1, 1], [0, 1, 1]]
WEIGHTS = torch.tensor([9.0, 4, 0.25, 1, 9, 0.5, 1.2])


def batch_of(weights=WEIGHTS, masks=MASKS):
    old = torch.linspace(-3, -1, len(weights))
    return packed(
        masks,
        old_logprobs=old,
        rollout_logprobs=old - weights.log(),
        advantages=torch.tensor([7.0 if m == 0 else 2.0 for mask in masks for m in mask]),
    )


def corrected(batch, **settings):
    after, metrics = correct_for_rollout(batch, **settings)
    return after.advantages.tolist(), metrics


def test_none_changes_nothing_and_says_nothing():
    batch = batch_of()
    after, metrics = correct_for_rollout(batch, rollout_is="none")
    assert after is batch and metrics == {}


def test_truncated_weights_of_tokens():
    advantages, metrics = corrected(batch_of(), rollout_is="truncate", rollout_is_threshold=2.0)
    assert advantages == pytest.approx([0, 4, 0.5, 2, 0, 1, 2.4], rel=1e-5)
    used = [2, 0.25, 1, 0.5, 1.2]
    assert metrics == {
        MEAN: pytest.approx(6.95 / 5, rel=1e-5),
        MAX: pytest.approx(4, rel=1e-5),
        BOUNDED: 0.2,
        EFFECTIVE: pytest.approx(sum(used) ** 2 / (5 * sum(w * w for w in used)), rel=1e-5),
    }


def test_masked_weights_of_tokens():
    advantages, metrics = corrected(batch_of(), rollout_is="mask", rollout_is_threshold=2.5)
    assert advantages == pytest.approx([0, 0, 0, 2, 0, 1, 2.4], rel=1e-5)
    used = [0, 0, 1, 0.5, 1.2]
    assert metrics[BOUNDED] == 0.4
    assert metrics[EFFECTIVE] == pytest.approx(
        sum(used) ** 2 / (5 * sum(w * w for w in used)), rel=1e-5
    )
    assert metrics[MAX] == pytest.approx(4, rel=1e-5)


@pytest.mark.parametrize(
    ("mode", "first", "second", "used"),
    [("truncate", 1.0, 0.6, (1, 0.6)), ("mask", 1.0, 0.0, (1, 0))],
)
def test_weights_of_whole_responses_are_products(mode, first, second, used):
    # 4 x 0.25 x 1 = 1 and 0.5 x 1.2 = 0.6
    settings = {"rollout_is": mode, "rollout_is_level": "sequence", "rollout_is_threshold": 1.5}
    advantages, metrics = corrected(batch_of(), **settings)
    expected = [0, *[2 * first] * 3, 0, *[2 * second] * 2]
    assert advantages == pytest.approx(expected, rel=1e-5)
    assert metrics == {
        MEAN: pytest.approx(0.8, rel=1e-5),
        MAX: pytest.approx(1, rel=1e-5),
        BOUNDED: 0.5 if mode == "mask" else 0.0,
        EFFECTIVE: pytest.approx(sum(used) ** 2 / (2 * sum(w * w for w in used)), rel=1e-5),
    }


def test_bounds_belong_to_the_inside_of_the_mask():
    weights = torch.tensor([0.5, 2.0, 0.499, 2.001], dtype=torch.float64)
    assert bounded_weights(weights, "mask", 2.0).tolist() == [0.5, 2.0, 0, 0]


def test_equal_engines_weigh_one():
    batch = batch_of(torch.ones(7))
    for level in ROLLOUT_IS_LEVELS:
        for mode in ("truncate", "mask"):
            advantages, metrics = corrected(batch, rollout_is=mode, rollout_is_level=level)
            assert advantages == [0, 2, 2, 2, 0, 2, 2]
            assert metrics == {MEAN: 1.0, MAX: 1.0, BOUNDED: 0.0, EFFECTIVE: 1.0}


@pytest.mark.parametrize("far", [1e4, -1e4])
def test_extremes_are_finite(far):
    logprobs, mask = torch.tensor([far, 0.0]), torch.ones(2, dtype=torch.bool)
    expected = math.exp(math.copysign(20, far))
    token = importance_weights(logprobs, torch.zeros(2), mask)
    assert token.tolist() == pytest.approx([expected, 1.0])
    bounds = torch.tensor([0, 2])
    whole = sequence_importance_weights(logprobs, torch.zeros(2), mask, bounds)
    assert whole.tolist() == pytest.approx([expected])


@pytest.mark.parametrize("level", ROLLOUT_IS_LEVELS)
@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_all_masked_and_nothing_at_all(mode, level):
    settings = {"rollout_is": mode, "rollout_is_level": level}
    nothing = batch_of(torch.ones(3), [[0, 0, 0]])
    advantages, metrics = corrected(nothing, **settings)
    assert advantages == [0, 0, 0]
    assert set(metrics.values()) == {0.0}
    far = batch_of(torch.full((2,), 1e-6), [[0, 1]])
    advantages, metrics = corrected(far, **settings)
    assert metrics[EFFECTIVE] == (0.0 if mode == "mask" else pytest.approx(1.0))
    empty = batch_of(torch.ones(0), [])
    assert corrected(empty, **settings)[0] == []


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("level", ROLLOUT_IS_LEVELS)
def test_grpo_08_what_is_under_mask_0_changes_no_bit(garbage, level):
    batch = batch_of()
    outside = ~batch.response_mask
    spoilt = batch.with_fields(
        **{
            name: getattr(batch, name).masked_fill(outside, garbage)
            for name in ("old_logprobs", "rollout_logprobs", "advantages")
        }
    )
    settings = {"rollout_is": "truncate", "rollout_is_level": level}
    assert corrected(spoilt, **settings) == corrected(batch, **settings)


@pytest.mark.parametrize("loss_mode", LOSS_MODES)
def test_a_weight_on_the_advantage_is_a_weight_on_the_loss_without_gradient(loss_mode):
    masks = random_masks(3, 5)
    generator = torch.Generator().manual_seed(4)
    size = sum(map(len, masks))
    new, old, rollout = (-2 * torch.rand(3, size, generator=generator)).unbind()
    advantages = torch.randn(size, generator=generator)
    batch = packed(masks, old_logprobs=old, rollout_logprobs=rollout, advantages=advantages)
    weighted, _ = correct_for_rollout(batch, rollout_is="truncate", rollout_is_threshold=1.5)
    objective = grpo_objective(
        max_response_tokens=8, loss_mode=loss_mode, loss_agg_mode="token-sum"
    )
    weights = (old.double() - rollout.double()).exp().clamp(max=1.5)
    total, gradient = 0.0, torch.zeros(size)
    for index in batch.response_mask.nonzero().flatten().tolist():
        one = torch.zeros(size)
        one[index] = 1.0
        alone = run_objective(objective, batch.with_fields(advantages=advantages * one), new)
        total += float(weights[index]) * alone.loss
        gradient += weights[index] * alone.gradient
    outcome = run_objective(objective, weighted, new)
    assert outcome.loss == pytest.approx(total, rel=1e-6)
    assert torch.allclose(outcome.gradient, gradient, rtol=1e-5, atol=1e-7)


def test_modes_and_defaults_are_those_of_the_configuration():
    hints = get_type_hints(AlgorithmConfig)
    assert get_args(hints["rollout_is"]) == ROLLOUT_IS
    assert get_args(hints["rollout_is_level"]) == ROLLOUT_IS_LEVELS
    parameters = inspect.signature(correct_for_rollout).parameters
    for name in ("rollout_is", "rollout_is_level", "rollout_is_threshold"):
        assert parameters[name].default == getattr(AlgorithmConfig(), name)


@pytest.mark.parametrize("setting", ["rollout_is", "rollout_is_level"])
def test_unknown_modes_are_refused(setting):
    with pytest.raises(ConfigError, match=rf"algorithm\.{setting}: 'all' is unknown; use one of"):
        correct_for_rollout(batch_of(), **{setting: "all"})
