"""The Bradley-Terry loss: by hand, against float64, in any split, and what must not count."""

import math

import pytest
import torch

from rl_megatron.interfaces.objective import ModelOutput
from rl_megatron.losses import reward_model_objective, totals
from tests.helpers.packed import packed, random_masks


def run(objective, batch, scores, parts=None):
    """Loss, metrics and gradient of a mini-batch, dealt to micro-batches of the given sequences."""
    batch = objective.weigh(batch)
    counts = totals(batch)
    leaf = scores.detach().clone().requires_grad_()
    loss, metrics = 0.0, {}
    for part in [range(batch.num_sequences)] if parts is None else parts:
        output = objective.loss(ModelOutput.of_scores(leaf[list(part)]), batch.select(part), counts)
        output.loss.backward()
        loss += output.loss.item()
        for name, value in output.metrics.items():
            assert not value.requires_grad
            metrics[name] = metrics.get(name, 0.0) + float(value)
    return loss, metrics, leaf.grad


def pairs(num_pairs=3, empty=(), **fields):
    return packed(random_masks(1, 2 * num_pairs, empty), paired=True, **fields)


def softplus(x):
    return math.log1p(math.exp(x))


def test_by_hand():
    scores = torch.tensor([2.0, 1.0, -0.5, 0.5])
    loss, metrics, gradient = run(reward_model_objective(), pairs(2), scores)
    # Margins 1 and -1: -ln sigmoid(1) = 0.313262, -ln sigmoid(-1) = 1.313262.
    assert loss == pytest.approx((0.31326169 + 1.31326169) / 2, abs=1e-7)
    assert metrics == pytest.approx(
        {
            "loss/reward_model": loss,
            "rewards/chosen": 0.75,
            "rewards/rejected": 0.75,
            "rewards/margins": 0.0,
            "rewards/accuracies": 0.5,
        }
    )
    # d/d margin = sigmoid(margin) - 1, over two pairs.
    right, wrong = (1 / (1 + math.exp(-1)) - 1) / 2, (1 / (1 + math.exp(1)) - 1) / 2
    assert gradient.tolist() == pytest.approx([right, -right, wrong, -wrong], rel=1e-6)


def test_a_margin_is_subtracted_and_not_part_of_the_metrics():
    scores = torch.tensor([2.0, 1.0, -0.5, 0.5])
    batch = pairs(2, margins=[0.5, 0.5, 3.0, 3.0])
    loss, metrics, _ = run(reward_model_objective(), batch, scores)
    assert loss == pytest.approx((softplus(-(1 - 0.5)) + softplus(-(-1 - 3.0))) / 2, rel=1e-7)
    assert metrics["rewards/margins"] == pytest.approx(0.0)
    assert metrics["rewards/accuracies"] == 0.5
    negative = pairs(2, margins=[-1.0] * 4)
    loss, _, _ = run(reward_model_objective(), negative, scores)
    assert loss == pytest.approx((softplus(-2.0) + softplus(0.0)) / 2, rel=1e-7)


def test_centering_is_the_squared_sum():
    scores = torch.tensor([2.0, 1.0, -0.5, 0.5])
    objective = reward_model_objective(center_rewards_coefficient=0.01)
    loss, metrics, gradient = run(objective, pairs(2), scores)
    plain, _, plain_gradient = run(reward_model_objective(), pairs(2), scores)
    assert metrics["loss/centering"] == pytest.approx((3.0**2 + 0.0) / 2)
    assert metrics["loss/reward_model"] == pytest.approx(plain)
    assert loss == pytest.approx(plain + 0.01 * 4.5)
    extra = [0.01 * 2 * 3.0 / 2] * 2 + [0.0] * 2
    assert (gradient - plain_gradient).tolist() == pytest.approx(extra, abs=1e-7)


@pytest.mark.parametrize("coefficient", [None, 0.1])
def test_float64_formula_and_any_split(coefficient):
    generator = torch.Generator().manual_seed(5)
    scores, asked = torch.randn(12, generator=generator) * 3, torch.rand(6, generator=generator)
    batch = pairs(6, margins=asked.repeat_interleave(2))
    objective = reward_model_objective(center_rewards_coefficient=coefficient)
    leaf = scores.double().requires_grad_()
    margins = leaf[0::2] - leaf[1::2] - asked.double()
    want = -torch.log(1 / (1 + torch.exp(-margins))).mean()
    want = want + (coefficient or 0.0) * ((leaf[0::2] + leaf[1::2]) ** 2).mean()
    want.backward()
    for parts in (None, [[0, 1], [2, 3, 4, 5], [6, 7, 8, 9, 10, 11]], [[8, 9], [10, 11], range(8)]):
        loss, metrics, gradient = run(objective, batch, scores, parts)
        assert loss == pytest.approx(want.item(), rel=1e-12)
        torch.testing.assert_close(gradient.double(), leaf.grad, atol=1e-8, rtol=1e-6)
        assert metrics["rewards/accuracies"] == pytest.approx(
            (leaf[0::2] > leaf[1::2]).double().mean().item()
        )


@pytest.mark.parametrize("hidden", [0.0, 7.0, math.nan, math.inf])
def test_a_pair_without_a_response_counts_nothing_whatever_its_scores_are(hidden):
    scores = torch.tensor([2.0, 1.0, hidden, hidden, -0.5, 0.5])
    objective = reward_model_objective(center_rewards_coefficient=0.01)
    margins = [0.1, 0.1, math.nan, math.nan, 0.2, 0.2]
    batch = pairs(3, empty=[3], margins=margins)
    loss, metrics, gradient = run(objective, batch, scores)
    kept = batch.select([0, 1, 4, 5])
    want, want_metrics, want_gradient = run(objective, kept, scores[[0, 1, 4, 5]])
    assert loss == want and metrics == want_metrics
    assert gradient[2:4].tolist() == [0.0, 0.0]
    assert torch.equal(gradient[[0, 1, 4, 5]], want_gradient)
    # Alone, as on a rank that has nothing else.
    parts = [[2, 3], [0, 1, 4, 5]]
    assert run(objective, batch, scores, parts)[0] == pytest.approx(want, rel=1e-12)


def test_dpo_09_two_valid_pairs_and_an_invalid_one_are_the_mean_of_two():
    # Losses 0.4 and 0.6: the margin of loss l is -ln(e^l - 1).
    first, second = (-math.log(math.exp(loss) - 1) for loss in (0.4, 0.6))
    scores = torch.tensor([first, 0.0, 9.0, 9.0, second, 0.0])
    batch = pairs(3, empty=[2])
    for parts in (None, [[2, 3], [0, 1, 4, 5]], [[0, 1], [2, 3], [4, 5]]):
        loss, metrics, _ = run(reward_model_objective(), batch, scores, parts)
        assert loss == pytest.approx(0.5, abs=1e-6)
        assert metrics["rewards/margins"] == pytest.approx((first + second) / 2, abs=1e-6)


def test_equal_scores_are_not_accurate_and_cost_ln_2():
    loss, metrics, _ = run(reward_model_objective(), pairs(2), torch.full((4,), 0.3))
    assert loss == pytest.approx(math.log(2))
    assert metrics["rewards/accuracies"] == 0.0


@pytest.mark.parametrize("shape", [(5,), (4, 1), (0,)])
def test_scores_of_another_shape_are_refused(shape):
    batch = reward_model_objective().weigh(pairs(2))
    output = ModelOutput(torch.zeros(0), torch.zeros(0))
    object.__setattr__(output, "scores", torch.zeros(shape))
    with pytest.raises(ValueError, match="one score for each of 4 sequences, found shape"):
        reward_model_objective().loss(output, batch, totals(batch))


def test_a_model_without_scores_is_refused():
    batch = reward_model_objective().weigh(pairs(2))
    output = ModelOutput(torch.zeros(batch.num_tokens), torch.zeros(batch.num_tokens))
    with pytest.raises(ValueError, match="found shape none"):
        reward_model_objective().loss(output, batch, totals(batch))


def test_margins_go_with_their_pairs():
    batch = pairs(3, margins=[1.0, 1.0, 2.0, 2.0, 3.0, 3.0])
    assert batch.select([4, 5, 0, 1]).margins.tolist() == [3.0, 3.0, 1.0, 1.0]
    assert batch.at_tokens(torch.tensor([0, 1])).margins is None
