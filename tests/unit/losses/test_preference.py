"""Losses of a pair, worked by hand."""

import math

import pytest
import torch

from rl_megatron.losses.preference import (
    hinge_loss,
    implicit_rewards,
    ipo_loss,
    odds_ratio_loss,
    robust_loss,
    sigmoid_loss,
)


def pair_of(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_label_smoothing_by_hand():
    # -0.9 * log(0.880797) - 0.1 * log(0.119203); -0.9 * log(0.268941) - 0.1 * log(0.731059)
    losses = sigmoid_loss(pair_of(2.0, -1.0), 0.1)
    assert losses.tolist() == pytest.approx([0.326928, 1.213262], abs=1e-6)


def test_robust_by_hand():
    # (0.9 * 0.126928 - 0.1 * 2.126928) / 0.8; (0.9 * 1.313262 - 0.1 * 0.313262) / 0.8
    losses = robust_loss(pair_of(2.0, -1.0), 0.1)
    assert losses.tolist() == pytest.approx([-0.123072, 1.438262], abs=1e-6)


def test_robust_is_unbiased_where_labels_are_flipped():
    margins, flipped = pair_of(2.0, -0.3), 0.2
    seen = (1 - flipped) * robust_loss(margins, flipped) + flipped * robust_loss(-margins, flipped)
    assert seen.tolist() == pytest.approx(sigmoid_loss(margins, 0.0).tolist(), rel=1e-12)


def test_hinge_by_hand():
    assert hinge_loss(pair_of(0.4, 1.0, 3.0, -1.0)).tolist() == pytest.approx([0.6, 0, 0, 2.0])


def test_ipo_is_least_at_half_over_beta():
    # The margin is beta times the log-ratio: 0.5, whatever beta.
    for beta in (0.1, 0.5):
        losses = ipo_loss(pair_of(0.5, 0.0), beta)
        assert losses.tolist() == pytest.approx([0.0, 1 / (4 * beta**2)], rel=1e-12)


def test_odds_ratio_by_hand():
    # Odds 0.5 / 0.5 = 1 against 0.2 / 0.8 = 1 / 4: a ratio of 4, and 4 / 5 is its sigmoid.
    chosen, rejected = pair_of(math.log(0.5)), pair_of(math.log(0.2))
    assert float(odds_ratio_loss(chosen, rejected)) == pytest.approx(-math.log(0.8), rel=1e-12)


def test_odds_of_what_is_almost_certain_keep_their_digits():
    chosen, rejected = pair_of(-1e-12), pair_of(-1e-9)
    # The odds are a thousand to one, and 1 - p itself would have four digits left.
    assert float(odds_ratio_loss(chosen, rejected)) == pytest.approx(math.log1p(1e-3), rel=1e-8)


def test_large_margins_stay_finite():
    margins = torch.tensor([800.0, -800.0], dtype=torch.float64, requires_grad=True)
    losses = sigmoid_loss(margins, 0.0)
    losses.sum().backward()
    assert losses.tolist() == [0.0, 800.0]
    assert margins.grad.tolist() == [0.0, -1.0]


def test_implicit_rewards_are_dealt_to_the_sides():
    rewards = implicit_rewards(torch.tensor([1.0, 2, 3, 4]), torch.tensor([0.0, 0, 1, 1]), beta=0.5)
    assert rewards.chosen.tolist() == [0.5, 1.0]
    assert rewards.rejected.tolist() == [1.0, 1.5]
    assert rewards.margins.tolist() == [-0.5, -0.5]
