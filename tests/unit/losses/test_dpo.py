import inspect
import math

import pytest
import torch

from rl_megatron.config.loss import DPOLossConfig
from rl_megatron.errors import ConfigError
from rl_megatron.losses.dpo import dpo_objective, implicit_rewards, sigmoid_loss
from tests.helpers.packed import packed, random_masks, run_objective


def pairs(*sums):
    """One-token responses: (policy chosen, policy rejected, reference chosen, rejected) each."""
    policy, reference = [], []
    for chosen, rejected, ref_chosen, ref_rejected in sums:
        policy += [0.0, chosen, 0.0, rejected]
        reference += [0.0, ref_chosen, 0.0, ref_rejected]
    batch = packed([[0, 1]] * (2 * len(sums)), paired=True, ref_logprobs=reference)
    return batch, torch.tensor(policy)


def random_pairs(seed=0, empty=()):
    masks = random_masks(seed, 8, empty)
    generator = torch.Generator().manual_seed(seed + 1)
    logprobs, ref = (-3 * torch.rand(2, sum(map(len, masks)), generator=generator)).unbind()
    return packed(masks, paired=True, ref_logprobs=ref), logprobs


def oracle(batch, logprobs, beta, smoothing, alpha):
    """Loss, metrics and gradient in plain Python, pair by pair."""
    bounds, mask = batch.cu_seqlens.tolist(), batch.response_mask.tolist()
    policy, reference = logprobs.tolist(), batch.ref_logprobs.tolist()
    kept = [[t for t in range(bounds[i], bounds[i + 1]) if mask[t]] for i in range(len(bounds) - 1)]
    valid = [p for p in range(len(kept) // 2) if kept[2 * p] and kept[2 * p + 1]]
    means = {}
    gradient = [0.0] * len(policy)

    def add(name, value):
        means[name] = means.get(name, 0.0) + value / len(valid)

    for p in valid:
        chosen, rejected = kept[2 * p], kept[2 * p + 1]
        logp = [math.fsum(policy[t] for t in side) for side in (chosen, rejected)]
        ref = [math.fsum(reference[t] for t in side) for side in (chosen, rejected)]
        rewards = [beta * (a - b) for a, b in zip(logp, ref, strict=True)]
        margin = rewards[0] - rewards[1]
        win = 1 / (1 + math.exp(-margin))
        add("loss/dpo", -(1 - smoothing) * math.log(win) - smoothing * math.log(1 - win))
        add("loss/nll", -logp[0] / len(chosen))
        add("rewards/chosen", rewards[0])
        add("rewards/rejected", rewards[1])
        add("rewards/margins", margin)
        add("rewards/accuracies", float(margin > 0))
        add("logps/chosen", logp[0])
        add("logps/rejected", logp[1])
        slope = beta * (win - (1 - smoothing)) / len(valid)
        for t in chosen:
            gradient[t] = slope - alpha / len(chosen) / len(valid)
        for t in rejected:
            gradient[t] = -slope
    return means["loss/dpo"] + alpha * means["loss/nll"], means, gradient


def test_dpo_01_reference_logprobs_are_used():
    batch, logprobs = pairs((-10, -14, -12, -13))
    for rpo_alpha in (None, 0.5):
        outcome = run_objective(dpo_objective(beta=0.1, rpo_alpha=rpo_alpha), batch, logprobs)
        assert outcome.metrics["rewards/margins"] == pytest.approx(0.3)  # beta times 3
        assert outcome.metrics["loss/dpo"] == pytest.approx(0.554355, abs=1e-6)
        assert outcome.loss == pytest.approx(0.554355 + 10 * (rpo_alpha or 0), abs=1e-6)


def test_dpo_09_invalid_pairs_count_nowhere():
    # Margins whose losses are 0.4 and 0.6, then a pair without a valid rejected token.
    margins = [-math.log(math.expm1(0.4)), -math.log(math.expm1(0.6))]
    batch = packed(
        [[0, 1], [0, 1], [0, 1], [0, 1], [0, 1], [0, 0]], paired=True, ref_logprobs=[0.0] * 12
    )
    logprobs = torch.tensor([0, margins[0], 0, 0, 0, margins[1], 0, 0, 0, 5.0, 0, math.nan])
    for parts in ([range(6)], [[0, 1, 2, 3], [4, 5]], [[4, 5], [2, 3], [0, 1]]):
        outcome = run_objective(dpo_objective(beta=1.0, rpo_alpha=0.0), batch, logprobs, parts)
        assert outcome.loss == pytest.approx(0.5, abs=1e-7)
        assert outcome.metrics["logps/chosen"] == pytest.approx(sum(margins) / 2)
        assert outcome.gradient[8:].tolist() == [0.0] * 4


def test_dpo_09_no_valid_pair_at_all():
    batch = packed([[0, 0], [0, 1]], paired=True, ref_logprobs=[0.0] * 4)
    outcome = run_objective(dpo_objective(rpo_alpha=1.0), batch, torch.full((4,), -1.0))
    assert outcome.loss == 0.0
    assert outcome.gradient.tolist() == [0.0] * 4
    assert set(outcome.metrics.values()) == {0.0}


def test_dpo_10_sums_not_averages():
    chosen, rejected = [0.0] + [-3.0] * 4, [0.0] + [-2.0] * 10
    ref = [0.0] + [-3.5] * 4 + [0.0] + [-1.8] * 10
    batch = packed([[0] + [1] * 4, [0] + [1] * 10], paired=True, ref_logprobs=ref)
    outcome = run_objective(dpo_objective(), batch, torch.tensor(chosen + rejected))
    assert outcome.metrics["logps/chosen"] == -12.0
    assert outcome.metrics["logps/rejected"] == -20.0
    assert outcome.metrics["rewards/margins"] == pytest.approx(0.4, abs=1e-6)
    assert outcome.loss == pytest.approx(0.513015, abs=1e-6)


@pytest.mark.parametrize("loss_type", ["hinge", "ipo", "sigmoidal"])
def test_dpo_10_a_loss_that_is_not_offered_is_refused(loss_type):
    with pytest.raises(ConfigError, match=f"loss_type: '{loss_type}'.*sigmoid"):
        dpo_objective(loss_type=loss_type)


def test_dpo_12_log_probs_belong_to_their_own_token():
    logits = torch.tensor([[0.0, 0, 0], [1, 0, 0], [0, 2, 0], [0, 0, 3]], dtype=torch.float64)
    ids = torch.tensor([2, 0, 1, 2])
    # The token at t is scored by the logits at t - 1, and the first by none.
    scored = torch.log_softmax(logits[:-1], dim=1).gather(1, ids[1:, None])[:, 0]
    chosen = torch.cat([torch.zeros(1, dtype=torch.float64), scored]).float()
    batch = packed([[0, 0, 1, 1], [0, 1]], paired=True, ref_logprobs=[0.0] * 6)
    outcome = run_objective(dpo_objective(), batch, torch.cat([chosen, torch.zeros(2)]))
    assert outcome.metrics["logps/chosen"] == pytest.approx(-3.790989, abs=1e-6)


def test_step_0_margin_is_zero_and_loss_is_ln_2():
    batch, logprobs = random_pairs()
    batch = batch.with_fields(ref_logprobs=logprobs)
    for smoothing in (0.0, 0.2):
        outcome = run_objective(dpo_objective(label_smoothing=smoothing), batch, logprobs)
        assert outcome.loss == pytest.approx(math.log(2), abs=1e-15)
        assert outcome.metrics["rewards/margins"] == 0.0
        assert outcome.metrics["rewards/accuracies"] == 0.0


@pytest.mark.parametrize(("smoothing", "alpha"), [(0.0, 0.0), (0.1, 0.0), (0.3, 1.5)])
@pytest.mark.parametrize("empty", [(), (3, 4)])
def test_loss_metrics_and_gradient_against_plain_python(smoothing, alpha, empty):
    batch, logprobs = random_pairs(seed=2, empty=empty)
    objective = dpo_objective(beta=0.4, label_smoothing=smoothing, rpo_alpha=alpha)
    loss, metrics, gradient = oracle(batch, logprobs, 0.4, smoothing, alpha)
    outcome = run_objective(objective, batch, logprobs)
    assert outcome.loss == pytest.approx(loss, rel=1e-9)
    assert outcome.metrics == pytest.approx(metrics, rel=1e-9)
    assert outcome.gradient.tolist() == pytest.approx(gradient, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("empty", [(), (1, 6, 7)])
def test_same_numbers_however_the_mini_batch_is_split(empty):
    batch, logprobs = random_pairs(seed=4, empty=empty)
    objective = dpo_objective(label_smoothing=0.1, rpo_alpha=0.7)
    whole = run_objective(objective, batch, logprobs)
    for parts in (
        [[0, 1], [2, 3], [4, 5], [6, 7]],
        [[6, 7, 0, 1], [], [4, 5, 2, 3]],
        [[2, 3, 4, 5, 6, 7], [0, 1]],
    ):
        other = run_objective(objective, batch, logprobs, parts)
        assert other.loss == pytest.approx(whole.loss, rel=1e-12)
        assert other.metrics == pytest.approx(whole.metrics, rel=1e-12)
        assert torch.equal(other.gradient, whole.gradient)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_what_is_under_mask_0_changes_no_bit(garbage):
    batch, logprobs = random_pairs(seed=6, empty=(2,))
    objective = dpo_objective(rpo_alpha=1.0)
    outside = ~batch.response_mask
    dirty_batch = batch.with_fields(ref_logprobs=batch.ref_logprobs.masked_fill(outside, garbage))
    clean = run_objective(objective, batch, logprobs)
    dirty = run_objective(objective, dirty_batch, logprobs.masked_fill(outside, garbage))
    assert dirty.loss == clean.loss
    assert dirty.metrics == clean.metrics
    assert torch.equal(dirty.gradient, clean.gradient)


def test_label_smoothing_by_hand():
    margins = torch.tensor([2.0, -1.0], dtype=torch.float64)
    # -0.9 * log(0.880797) - 0.1 * log(0.119203); -0.9 * log(0.268941) - 0.1 * log(0.731059)
    assert sigmoid_loss(margins, 0.1).tolist() == pytest.approx([0.326928, 1.213262], abs=1e-6)


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


def test_a_batch_without_pairs_is_our_mistake():
    batch = packed([[0, 1], [0, 1]], ref_logprobs=[0.0] * 4)
    with pytest.raises(AssertionError, match="pairs"):
        run_objective(dpo_objective(), batch, torch.zeros(4))


def test_keywords_and_defaults_are_those_of_the_configuration():
    parameters = inspect.signature(dpo_objective).parameters
    assert {k: p.default for k, p in parameters.items()} == DPOLossConfig().model_dump()
