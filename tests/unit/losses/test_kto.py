"""KTO against its paper's formulas, and against TRL's on a case worked by hand."""

import inspect
import math

import pytest
import torch

from rl_megatron.config.loss import KTOLossConfig
from rl_megatron.losses.kto import baseline_kl, kto_objective
from tests.helpers.packed import packed, random_masks, run_objective


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def judged(masks, verdicts, reference):
    return packed(masks, ref_logprobs=reference, desirable=torch.tensor(verdicts))


def random_rows(seed=0, num=9, empty=()):
    masks = random_masks(seed, num, empty)
    generator = torch.Generator().manual_seed(seed + 1)
    logprobs, ref = (-3 * torch.rand(2, sum(map(len, masks)), generator=generator)).unbind()
    verdicts = (torch.rand(num, generator=generator) < 0.4).tolist()
    return judged(masks, verdicts, ref), logprobs


def oracle(batch, logprobs, beta, kl, weights):
    """Loss, metrics and gradient in plain Python, response by response (eq. 7 and 8)."""
    bounds, mask = batch.cu_seqlens.tolist(), batch.response_mask.tolist()
    policy, reference = logprobs.tolist(), batch.ref_logprobs.tolist()
    kept = [[t for t in range(bounds[i], bounds[i + 1]) if mask[t]] for i in range(len(bounds) - 1)]
    valid = [i for i, tokens in enumerate(kept) if tokens]
    loss, gradient = 0.0, [0.0] * len(policy)
    sums = {True: [0, 0.0, 0.0], False: [0, 0.0, 0.0]}
    for i in valid:
        desirable = bool(batch.desirable[i])
        logp = math.fsum(policy[t] for t in kept[i])
        ratio = logp - math.fsum(reference[t] for t in kept[i])
        sign, weight = (1, weights[0]) if desirable else (-1, weights[1])
        value = sigmoid(sign * beta * (ratio - kl))
        loss += weight * (1 - value) / len(valid)
        for t in kept[i]:
            gradient[t] = -weight * value * (1 - value) * sign * beta / len(valid)
        kind = sums[desirable]
        kind[0], kind[1], kind[2] = kind[0] + 1, kind[1] + beta * ratio, kind[2] + logp
    metrics = {"loss/kto": loss}
    for desirable, name in ((True, "chosen"), (False, "rejected")):
        count, reward, logp = sums[desirable]
        metrics |= {f"rewards/{name}": reward / count, f"logps/{name}": logp / count}
    metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
    return loss, metrics, gradient


@pytest.mark.parametrize("empty", [(), (1, 4)])
@pytest.mark.parametrize(
    ("beta", "kl", "weights"),
    [(0.1, 0.0, (1.0, 1.0)), (0.5, 1.7, (1.33, 1.0)), (2.0, 0.3, (1.0, 3.0))],
)
@pytest.mark.parametrize("parts", [None, [[8, 0], [3], [1, 2, 4, 5, 6, 7]]])
def test_loss_metrics_and_gradient_are_those_of_the_formula(beta, kl, weights, empty, parts):
    batch, logprobs = random_rows(empty=empty)
    objective = kto_objective(
        beta=beta, desirable_weight=weights[0], undesirable_weight=weights[1], kl=kl
    )
    found = run_objective(objective, batch, logprobs, parts)
    loss, metrics, gradient = oracle(batch, logprobs, beta, kl, weights)
    assert found.loss == pytest.approx(loss, rel=1e-12)
    assert found.metrics == pytest.approx(metrics, rel=1e-12)
    assert found.gradient.tolist() == pytest.approx(gradient, rel=1e-6, abs=1e-12)


def test_trls_formula_worked_by_hand():
    """KTOTrainer's loss on four responses of one token, KL from four mismatched ones.

    Log-ratios of policy and reference: desirable 2 and -1, undesirable 1 and -3; mismatched 0.5,
    1, -0.25, 0.75: kl = max(0, mean) = 0.5. beta 0.1, weights 1 and 2:
    1 - sigmoid(0.15) = 0.462570, 1 - sigmoid(-0.15) = 0.537430,
    2 (1 - sigmoid(-0.05)) = 1.024995, 2 (1 - sigmoid(0.35)) = 0.826764; their mean is 0.712940.
    """
    masks = [[0, 1]] * 4
    mismatched = packed(masks, ref_logprobs=[0, -5] * 4)
    kl = baseline_kl(mismatched, torch.tensor([9, -4.5, 9, -4, 9, -5.25, 9, -4.25]))
    assert kl == 0.5
    batch = judged(masks, [True, False, True, False], [0, -5] * 4)
    objective = kto_objective(beta=0.1, undesirable_weight=2.0, kl=kl)
    found = run_objective(objective, batch, torch.tensor([0, -3.0, 0, -4, 0, -6, 0, -8]))
    assert found.loss == pytest.approx(0.712940, abs=1e-6)
    assert found.metrics == pytest.approx(
        {
            "loss/kto": 0.712940,
            "rewards/chosen": 0.05,
            "rewards/rejected": -0.1,
            "rewards/margins": 0.15,
            "logps/chosen": -4.5,
            "logps/rejected": -6.0,
        },
        abs=1e-6,
    )


def test_apo_zero_unpaired_is_its_own_formula():
    """1 - sigmoid(beta r) of a desirable response, sigmoid(beta r) of an undesirable one."""
    batch = judged([[0, 1]] * 2, [True, False], [0, -5, 0, -5])
    objective = kto_objective(beta=0.5, loss_type="apo_zero_unpaired")
    found = run_objective(objective, batch, torch.tensor([0, -3.0, 0, -4.0]))
    assert found.loss == pytest.approx((1 - sigmoid(1.0) + sigmoid(0.5)) / 2, rel=1e-12)


def test_no_gradient_comes_from_far_off_and_none_is_lost():
    # 1 - sigmoid(40) is 4e-18, and 0 where 1 is subtracted from a rounded sigmoid.
    batch = judged([[0, 1]] * 2, [True, False], [0.0, 0, 0, 0])
    found = run_objective(kto_objective(beta=1.0), batch, torch.tensor([0, 40.0, 0, -40.0]))
    assert found.loss == pytest.approx(math.exp(-40), rel=1e-6)
    assert found.gradient[1] == pytest.approx(-math.exp(-40) / 2, rel=1e-6)


def test_the_kl_is_never_negative_and_counts_responses_with_a_token():
    masks = [[0, 1, 1], [0, 0], [0, 1]]
    batch = packed(masks, ref_logprobs=[math.nan, -1, -1, 0, 0, math.nan, -2])
    logprobs = torch.tensor([5, -0.5, -0.25, math.inf, 1, 1, -1])
    assert baseline_kl(batch, logprobs) == pytest.approx((1.25 + 1) / 2)
    assert baseline_kl(batch, logprobs - 10) == 0.0
    nothing = packed([[0, 0]], ref_logprobs=[0, 0])
    assert baseline_kl(nothing, torch.zeros(2)) == 0.0


@pytest.mark.parametrize("verdict", [True, False])
def test_a_mini_batch_of_one_kind_has_no_metrics_of_the_other(verdict):
    batch = judged([[0, 1]] * 2, [verdict, verdict], [0.0, -1, 0, -1])
    found = run_objective(kto_objective(), batch, torch.zeros(4))
    there = "chosen" if verdict else "rejected"
    assert found.metrics.keys() == {"loss/kto", f"rewards/{there}", f"logps/{there}"}


def test_what_does_not_count_changes_no_bit():
    batch, logprobs = random_rows(empty=(2,))
    expected = run_objective(kto_objective(kl=0.2), batch, logprobs)
    outside = ~batch.response_mask
    noise = torch.where(outside, math.nan, logprobs)
    broken = batch.with_fields(ref_logprobs=torch.where(outside, math.inf, batch.ref_logprobs))
    found = run_objective(kto_objective(kl=0.2), broken, noise)
    assert (found.loss, found.metrics) == (expected.loss, expected.metrics)
    assert torch.equal(found.gradient, expected.gradient)


def test_the_settings_are_the_arguments():
    names = set(inspect.signature(kto_objective).parameters) - {"kl"}
    assert set(KTOLossConfig.model_fields) == names
    defaults = {n: p.default for n, p in inspect.signature(kto_objective).parameters.items()}
    assert KTOLossConfig().model_dump() == {n: defaults[n] for n in names}
