import inspect
import math

import pytest
import torch

from rl_megatron.config.loss import DPOLossConfig
from rl_megatron.errors import ConfigError
from rl_megatron.losses.dpo import dpo_objective
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


def log_sigmoid(x):
    return -math.log1p(math.exp(-x))


def log_odds(mean):
    return mean - math.log(1 - math.exp(mean))


AVERAGED = ("sigmoid_norm", "ipo", "simpo", "orpo")
WITHOUT_REFERENCE = ("simpo", "orpo")
FORMULAS = {
    "sigmoid": lambda a, b, beta, e: -(1 - e) * log_sigmoid(a - b) - e * log_sigmoid(b - a),
    "sigmoid_norm": lambda a, b, beta, e: -(1 - e) * log_sigmoid(a - b) - e * log_sigmoid(b - a),
    "robust": lambda a, b, beta, e: (
        (-(1 - e) * log_sigmoid(a - b) + e * log_sigmoid(b - a)) / (1 - 2 * e)
    ),
    "hinge": lambda a, b, beta, e: max(0.0, 1 - (a - b)),
    "ipo": lambda a, b, beta, e: ((a - b) / beta - 1 / (2 * beta)) ** 2,
    "simpo": lambda a, b, beta, e: -log_sigmoid(a - b - 0.3),
    "orpo": lambda a, b, beta, e: -log_sigmoid(log_odds(a / beta) - log_odds(b / beta)),
}


def oracle(batch, logprobs, beta, smoothing, alpha, loss_type="sigmoid"):
    """Loss, metrics and gradient in plain Python, pair by pair; the gradient by differences."""
    bounds, mask = batch.cu_seqlens.tolist(), batch.response_mask.tolist()
    policy, reference = logprobs.tolist(), batch.ref_logprobs.tolist()
    if loss_type in WITHOUT_REFERENCE:
        reference = [0.0] * len(reference)
    kept = [[t for t in range(bounds[i], bounds[i + 1]) if mask[t]] for i in range(len(bounds) - 1)]
    valid = [p for p in range(len(kept) // 2) if kept[2 * p] and kept[2 * p + 1]]
    formula = FORMULAS[loss_type]
    weight, nll_weight = (beta, 1.0) if loss_type == "orpo" else (1.0, alpha)
    means = {}
    gradient = [0.0] * len(policy)

    def add(name, value):
        means[name] = means.get(name, 0.0) + value / len(valid)

    def loss_of(rewards):
        return formula(*rewards, beta, smoothing)

    for p in valid:
        sides = kept[2 * p], kept[2 * p + 1]
        divisors = [len(side) if loss_type in AVERAGED else 1 for side in sides]
        logp = [math.fsum(policy[t] for t in s) / d for s, d in zip(sides, divisors, strict=True)]
        ref = [math.fsum(reference[t] for t in s) / d for s, d in zip(sides, divisors, strict=True)]
        rewards = [beta * (a - b) for a, b in zip(logp, ref, strict=True)]
        nll = -math.fsum(policy[t] for t in sides[0]) / len(sides[0])
        add("loss/dpo", loss_of(rewards))
        add("rewards/chosen", rewards[0])
        add("rewards/rejected", rewards[1])
        add("rewards/margins", rewards[0] - rewards[1])
        add("rewards/accuracies", float(rewards[0] > rewards[1]))
        add("logps/chosen", logp[0])
        add("logps/rejected", logp[1])
        if nll_weight is not None:
            add("loss/nll", nll)
        for side in (0, 1):
            step = 1e-5
            moved = [
                [r + sign * step * (i == side) for i, r in enumerate(rewards)] for sign in (1, -1)
            ]
            slope = (loss_of(moved[0]) - loss_of(moved[1])) / (2 * step)
            for t in sides[side]:
                gradient[t] = weight * slope * beta / divisors[side] / len(valid)
        for t in sides[0]:
            gradient[t] -= (nll_weight or 0.0) / len(sides[0]) / len(valid)
    total = weight * means["loss/dpo"] + (nll_weight or 0.0) * means.get("loss/nll", 0.0)
    return total, means, gradient


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


@pytest.mark.parametrize(
    ("loss_type", "expected"),
    [("sigmoid", 0.513015), ("hinge", 0.6), ("ipo", 18.49), ("sigmoid_norm", 0.658760)],
)
def test_dpo_10_every_loss_is_the_one_that_was_asked_for(loss_type, expected):
    chosen, rejected = [0.0] + [-3.0] * 4, [0.0] + [-2.0] * 10
    ref = [0.0] + [-3.5] * 4 + [0.0] + [-1.8] * 10
    batch = packed([[0] + [1] * 4, [0] + [1] * 10], paired=True, ref_logprobs=ref)
    outcome = run_objective(
        dpo_objective(loss_type=loss_type), batch, torch.tensor(chosen + rejected)
    )
    assert outcome.loss == pytest.approx(expected, abs=1e-5)


def test_dpo_10_a_loss_that_is_not_offered_is_refused():
    with pytest.raises(ConfigError, match="loss_type: 'sigmoidal'.*sigmoid, sigmoid_norm, robust"):
        dpo_objective(loss_type="sigmoidal")


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


NUMBERS = [
    ("sigmoid", 0.0, None),
    ("sigmoid", 0.1, None),
    ("sigmoid", 0.3, 1.5),
    ("sigmoid_norm", 0.1, None),
    ("robust", 0.2, 0.5),
    ("hinge", 0.0, None),
    ("ipo", 0.0, 0.5),
    ("simpo", 0.0, None),
    ("orpo", 0.0, None),
]


@pytest.mark.parametrize(("loss_type", "smoothing", "alpha"), NUMBERS)
@pytest.mark.parametrize("empty", [(), (3, 4)])
def test_loss_metrics_and_gradient_against_plain_python(loss_type, smoothing, alpha, empty):
    batch, logprobs = random_pairs(seed=2, empty=empty)
    objective = dpo_objective(
        beta=0.4,
        loss_type=loss_type,
        label_smoothing=smoothing,
        simpo_gamma=0.3,
        rpo_alpha=alpha,
    )
    loss, metrics, gradient = oracle(batch, logprobs, 0.4, smoothing, alpha, loss_type)
    if loss_type in WITHOUT_REFERENCE:
        batch = batch.with_fields(ref_logprobs=None)
    outcome = run_objective(objective, batch, logprobs)
    assert outcome.loss == pytest.approx(loss, rel=1e-9)
    assert outcome.metrics == pytest.approx(metrics, rel=1e-9)
    assert outcome.gradient.tolist() == pytest.approx(gradient, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("loss_type", FORMULAS)
@pytest.mark.parametrize("empty", [(), (1, 6, 7)])
def test_same_numbers_however_the_mini_batch_is_split(loss_type, empty):
    batch, logprobs = random_pairs(seed=4, empty=empty)
    objective = dpo_objective(loss_type=loss_type, label_smoothing=0.1, rpo_alpha=0.7)
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


@pytest.mark.parametrize("loss_type", FORMULAS)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_what_is_under_mask_0_changes_no_bit(garbage, loss_type):
    batch, logprobs = random_pairs(seed=6, empty=(2,))
    objective = dpo_objective(loss_type=loss_type, rpo_alpha=1.0)
    outside = ~batch.response_mask
    dirty_batch = batch.with_fields(ref_logprobs=batch.ref_logprobs.masked_fill(outside, garbage))
    clean = run_objective(objective, batch, logprobs)
    dirty = run_objective(objective, dirty_batch, logprobs.masked_fill(outside, garbage))
    assert dirty.loss == clean.loss
    assert dirty.metrics == clean.metrics
    assert torch.equal(dirty.gradient, clean.gradient)


def test_a_batch_without_pairs_is_our_mistake():
    batch = packed([[0, 1], [0, 1]], ref_logprobs=[0.0] * 4)
    with pytest.raises(AssertionError, match="pairs"):
        run_objective(dpo_objective(), batch, torch.zeros(4))


def test_keywords_and_defaults_are_those_of_the_configuration():
    parameters = inspect.signature(dpo_objective).parameters
    defaults = {k: p.default for k, p in parameters.items() if k != "implementation"}
    assert defaults == DPOLossConfig().model_dump()
