import math

import pytest
import torch

from rl_megatron.losses.policy import (
    clipped_ratio_loss,
    clipped_weight_loss,
    sequence_ratio,
    token_ratio,
)


def ratio_loss(logprobs, advantages, low=0.2, high=0.28, c=3.0):
    """The clipped loss against old log-probs of 0."""
    ratio = token_ratio(logprobs, torch.zeros_like(logprobs))
    return clipped_ratio_loss(ratio, advantages, low, high, c)


def weight_loss(logprobs, old_logprobs, advantages, low=0.2, high=0.28):
    ratio = token_ratio(logprobs, old_logprobs)
    return clipped_weight_loss(logprobs, ratio, advantages, low, high)


@pytest.mark.parametrize(
    ("advantage", "ratio", "expected", "expected_without_dual", "gradient_is_zero"),
    [
        (1, 1.5, -1.28, -1.28, True),
        (1, 0.5, -0.5, -0.5, False),
        (-1, 1.5, 1.5, 1.5, False),
        (-1, 0.5, 0.8, 0.8, True),
        (-1, 5, 3.0, 5.0, True),
        (1, 5, -1.28, -1.28, True),
    ],
)
def test_grpo_09_clip_table(advantage, ratio, expected, expected_without_dual, gradient_is_zero):
    for c, value in ((3.0, expected), (None, expected_without_dual)):
        logprobs = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
        result = ratio_loss(logprobs, torch.tensor([float(advantage)]).double(), c=c)
        result.loss.sum().backward()
        assert result.loss.item() == pytest.approx(value)
        zero = gradient_is_zero and not (advantage < 0 and ratio == 5 and c is None)
        assert logprobs.grad.item() == (0.0 if zero else pytest.approx(-advantage * ratio))


def test_clip_indicators_tell_the_three_kinds_apart():
    ratios = torch.tensor([1.5, 0.5, 1.5, 0.5, 5.0, 5.0], dtype=torch.float64)
    advantages = torch.tensor([1.0, 1, -1, -1, -1, 1], dtype=torch.float64)
    result = clipped_ratio_loss(ratios, advantages, 0.2, 0.28, 3.0)
    assert result.clipped_low.tolist() == [False, False, False, True, False, False]
    assert result.clipped_high.tolist() == [True, False, False, False, False, True]
    assert result.clipped_dual.tolist() == [False, False, False, False, True, False]


def test_whole_gradient_where_the_ratio_is_one():
    logprobs = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([2.0, -3.0], dtype=torch.float64)
    ratio_loss(logprobs, advantages).loss.sum().backward()
    assert logprobs.grad.tolist() == [-2.0, 3.0]


def test_low_of_1_never_clips_below():
    logprobs = torch.tensor([-19.0, 0.5], dtype=torch.float64, requires_grad=True)
    result = ratio_loss(logprobs, torch.tensor([-1.0, -1.0]).double(), low=1.0)
    result.loss.sum().backward()
    assert not result.clipped_low.any()
    assert logprobs.grad.tolist() == pytest.approx([math.exp(-19), math.exp(0.5)])


@pytest.mark.parametrize("log_ratio", [25.0, -25.0, 1e4, -1e4])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_extreme_log_ratio_is_finite_without_gradient(log_ratio, advantage):
    logprobs = torch.tensor([log_ratio], requires_grad=True)
    result = ratio_loss(logprobs, torch.tensor([advantage]), c=None)
    result.loss.sum().backward()
    assert result.ratio.item() == pytest.approx(math.exp(math.copysign(20, log_ratio)))
    assert math.isfinite(result.loss.item())
    assert logprobs.grad.item() == 0.0


def test_sequence_ratio_is_the_geometric_mean_over_counted_tokens():
    # Response 1: log-ratios 0.3, -0.1, and one of 7 that is not counted; response 2: 0.5.
    old = torch.tensor([9.0, -1, -2, -3, 9, -1], dtype=torch.float64)
    new = old + torch.tensor([9.0, 0.3, -0.1, 7, 9, 0.5], dtype=torch.float64)
    new.requires_grad_()
    counted = torch.tensor([0, 1, 1, 0, 0, 1], dtype=torch.bool)
    ratio = sequence_ratio(new, old, counted, torch.tensor([0, 4, 6]))
    expected = [math.exp(0.1)] * 4 + [math.exp(0.5)] * 2
    assert ratio.tolist() == pytest.approx(expected, rel=1e-14)
    # d ratio / d logprobs of a counted token: the ratio over the number of tokens.
    (ratio[0] + 10 * ratio[4]).backward()
    half = math.exp(0.1) / 2
    assert new.grad.tolist() == pytest.approx([0, half, half, 0, 0, 10 * math.exp(0.5)])


def test_sequence_ratio_of_nothing_is_one():
    zeros = torch.zeros(3, dtype=torch.float64)
    none = torch.zeros(3, dtype=torch.bool)
    assert sequence_ratio(zeros, zeros, none, torch.tensor([0, 2, 2, 3])).tolist() == [1, 1, 1]
    assert sequence_ratio(zeros[:0], zeros[:0], none[:0], torch.tensor([0])).tolist() == []


@pytest.mark.parametrize("log_ratio", [1e4, -1e4])
def test_extreme_sequence_ratio_is_finite_without_gradient(log_ratio):
    new = torch.tensor([log_ratio, 0.0], dtype=torch.float64, requires_grad=True)
    counted = torch.ones(2, dtype=torch.bool)
    ratio = sequence_ratio(new, torch.zeros(2).double(), counted, torch.tensor([0, 2]))
    ratio.sum().backward()
    assert ratio.tolist() == pytest.approx([math.exp(math.copysign(20, log_ratio))] * 2)
    assert new.grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("advantage", "ratio", "weight"),
    [(1, 1.5, 1.28), (1, 0.5, 0.8), (-1, 1.5, 1.28), (-1, 0.5, 0.8), (2, 1.1, 1.1), (-1, 5, 1.28)],
)
def test_cispo_weighs_the_gradient_and_never_drops_it(advantage, ratio, weight):
    logprobs = torch.tensor([-2.0], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-2.0 - math.log(ratio)], dtype=torch.float64)
    result = weight_loss(logprobs, old, torch.tensor([float(advantage)]).double())
    result.loss.sum().backward()
    assert result.loss.item() == pytest.approx(advantage * weight * 2.0)
    assert logprobs.grad.item() == pytest.approx(-advantage * weight)
    assert result.clipped_low.item() == (ratio == 0.5)
    assert result.clipped_high.item() == (ratio in (1.5, 5))
    assert not result.clipped_dual.item()


def test_cispo_without_a_lower_bound():
    logprobs = torch.tensor([-5.0], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-5.0 + 8.0], dtype=torch.float64)
    result = weight_loss(logprobs, old, torch.ones(1).double(), low=1.0)
    result.loss.sum().backward()
    assert logprobs.grad.item() == pytest.approx(-math.exp(-8))


@pytest.mark.parametrize("log_ratio", [1e4, -1e4])
def test_extreme_cispo_is_finite(log_ratio):
    logprobs = torch.tensor([-1e4], dtype=torch.float64, requires_grad=True)
    result = weight_loss(logprobs, logprobs.detach() - log_ratio, torch.ones(1).double())
    result.loss.sum().backward()
    bound = 1.28 if log_ratio > 0 else 0.8
    assert result.loss.item() == pytest.approx(bound * 1e4)
    assert logprobs.grad.item() == pytest.approx(-bound)
