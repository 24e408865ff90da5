import math
from decimal import Decimal, getcontext
from itertools import pairwise

import pytest
import torch

from rl_megatron.kernels.policy_loss import METRICS, PolicyLossSettings, policy_loss
from rl_megatron.kernels.policy_loss.door import SEQUENCE_BLOCK, TOKENS_BLOCK
from rl_megatron.losses import grpo_objective, totals
from tests.helpers.packed import Outcome, packed, random_masks, run_objective

MODES = ("vanilla", "gspo", "cispo")
RATIO_MAX = METRICS[-1]


def random_batch(masks, seed=0):
    """Log-ratios so wide that every kind of clipping occurs."""
    generator = torch.Generator().manual_seed(seed + 1)
    num_tokens = sum(map(len, masks))
    logprobs, old, ref = (-3 * torch.rand(3, num_tokens, generator=generator)).unbind()
    advantages = 2 * torch.randn(num_tokens, generator=generator)
    entropy = torch.rand(num_tokens, generator=generator)
    batch = packed(masks, old_logprobs=old, ref_logprobs=ref, advantages=advantages)
    return batch, logprobs, entropy


def objective_of(settings, agg="seq-mean-token-mean"):
    """The definition with the same numbers."""
    return grpo_objective(
        max_response_tokens=8,
        loss_mode=settings.loss_mode,
        loss_agg_mode=agg,
        clip_ratio_low=settings.clip_ratio_low,
        clip_ratio_high=settings.clip_ratio_high,
        clip_ratio_c=settings.clip_ratio_c,
        use_kl_loss=settings.kl_loss_type is not None,
        kl_loss_coef=settings.kl_loss_coef,
        kl_loss_type=settings.kl_loss_type or "k3",
        allow_k1_loss=True,
        entropy_coef=settings.entropy_coef,
    )


def run_kernel(settings, batch, logprobs, entropy, parts=None, agg="seq-mean-token-mean"):
    """The kernel over the mini-batch, as `run_objective` runs the definition."""
    batch = objective_of(settings, agg).weigh(batch)
    scale = 1 / max(totals(batch).num_tokens, 1)
    leaf = logprobs.clone().requires_grad_()
    entropy = entropy.clone().requires_grad_()
    loss, metrics = 0.0, {}
    for part in [range(batch.num_sequences)] if parts is None else parts:
        some, index = batch.select(part), batch.token_index(part)
        result = policy_loss(
            settings, leaf[index], entropy[index], some.old_logprobs, some.advantages,
            some.loss_weights, some.ref_logprobs, some.cu_seqlens, scale,
        )  # fmt: skip
        result.loss.backward()
        loss += result.loss.item()
        for name, value in result.metrics.items():
            assert value.dtype == torch.float64 and not value.requires_grad
            metrics[name] = metrics.get(name, 0.0) + value.item()
        largest = result.ratio_max.item()
        metrics[RATIO_MAX] = (
            largest if math.isnan(largest) else max(metrics.get(RATIO_MAX, -1.0), largest)
        )
    return Outcome(loss, metrics, leaf.grad, entropy.grad)


def assert_equal(got, want):
    """Equal but for the last digits of float64, and of float32 where gradients are stored."""
    assert got.loss == pytest.approx(want.loss, rel=1e-12, abs=1e-15)
    assert got.metrics == pytest.approx(want.metrics, rel=1e-12, abs=1e-15)
    assert torch.allclose(got.gradient, want.gradient, rtol=1.2e-7, atol=0)
    assert (got.entropy_gradient is None) == (want.entropy_gradient is None)
    if want.entropy_gradient is not None:
        assert torch.equal(got.entropy_gradient, want.entropy_gradient)


@pytest.mark.parametrize("kl_loss_type", [None, "k1", "k2", "k3"])
@pytest.mark.parametrize("clip_ratio_c", [3.0, None])
@pytest.mark.parametrize("loss_mode", MODES)
def test_equals_the_definition(loss_mode, clip_ratio_c, kl_loss_type):
    settings = PolicyLossSettings(
        loss_mode=loss_mode,
        clip_ratio_low=0.1,
        clip_ratio_high=0.15,
        clip_ratio_c=clip_ratio_c,
        kl_loss_type=kl_loss_type,
        kl_loss_coef=0.1,
        entropy_coef=0.3 if kl_loss_type in (None, "k3") else 0.0,
    )
    masks = [*random_masks(3, 4, empty=(2,)), [], [0, 1]]
    batch, logprobs, entropy = random_batch(masks)
    got = run_kernel(settings, batch, logprobs, entropy)
    want = run_objective(objective_of(settings), batch, logprobs, entropy=entropy)
    clipped = [got.metrics[f"policy/clip_fraction_{side}"] for side in ("low", "high")]
    assert all(clipped) and got.gradient.any()
    assert_equal(got, want)


@pytest.mark.parametrize("loss_mode", MODES)
def test_several_blocks_and_micro_batches(loss_mode):
    settings = PolicyLossSettings(loss_mode=loss_mode, kl_loss_type="k3", entropy_coef=0.1)
    lengths = (SEQUENCE_BLOCK + 40, 3, 2 * TOKENS_BLOCK)
    batch, logprobs, entropy = random_batch([[0] + [1] * (n - 1) for n in lengths])
    got = run_kernel(settings, batch, logprobs, entropy, agg="token-mean")
    want = run_objective(objective_of(settings, "token-mean"), batch, logprobs, entropy=entropy)
    assert_equal(got, want)
    split = run_kernel(settings, batch, logprobs, entropy, [[2], [], [0, 1]], agg="token-mean")
    assert_equal(split, want)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("loss_mode", MODES)
def test_grpo_08_what_is_under_weight_0_changes_no_bit(loss_mode, garbage):
    settings = PolicyLossSettings(loss_mode=loss_mode, kl_loss_type="k3", entropy_coef=0.1)
    batch, logprobs, entropy = random_batch(random_masks(8, 4, empty=(1,)))
    outside = ~batch.response_mask
    spoilt = {
        name: getattr(batch, name).masked_fill(outside, garbage)
        for name in ("old_logprobs", "ref_logprobs", "advantages")
    }
    clean = run_kernel(settings, batch, logprobs, entropy)
    dirty = run_kernel(
        settings,
        batch.with_fields(**spoilt),
        logprobs.masked_fill(outside, garbage),
        entropy.masked_fill(outside, garbage),
    )
    assert dirty.loss == clean.loss and dirty.metrics == clean.metrics
    assert torch.equal(dirty.gradient, clean.gradient)
    assert torch.equal(dirty.entropy_gradient, clean.entropy_gradient)
    assert not clean.gradient[outside].any() and not clean.entropy_gradient[outside].any()


@pytest.mark.parametrize("masks", [[], [[]], [[0]], [[0, 0], [0]]])
@pytest.mark.parametrize("loss_mode", MODES)
def test_grpo_08_nothing_counts(loss_mode, masks):
    settings = PolicyLossSettings(loss_mode=loss_mode, kl_loss_type="k3", entropy_coef=0.1)
    batch, logprobs, entropy = random_batch(masks)
    nothing = torch.full_like(logprobs, math.nan)
    got = run_kernel(settings, batch, nothing, entropy)
    assert got.loss == 0 and set(got.metrics.values()) == {0.0}
    assert torch.equal(got.gradient, torch.zeros_like(logprobs))


@pytest.mark.parametrize("loss_mode", MODES)
def test_garbage_in_a_token_that_counts_is_not_hidden(loss_mode):
    batch, logprobs, entropy = random_batch(random_masks(0, 3))
    logprobs[batch.response_mask.nonzero()[0]] = math.nan
    got = run_kernel(PolicyLossSettings(loss_mode=loss_mode), batch, logprobs, entropy)
    assert math.isnan(got.loss) and math.isnan(got.metrics[RATIO_MAX])


def one_token(settings, logprob, old=0.0, ref=None, advantage=1.0, weight=1.0, upstream=1.0):
    """Result and gradient of a micro-batch of one token that counts."""
    leaf = torch.tensor([0.0, logprob], requires_grad=True)
    numbers = [torch.tensor([0.0, x]) for x in (old, advantage, weight)]
    reference = None if ref is None else torch.tensor([0.0, ref])
    bounds = torch.tensor([0, 2])
    result = policy_loss(settings, leaf, torch.zeros(2), *numbers, reference, bounds, 1.0)
    (result.loss * upstream).backward()
    return result, leaf.grad[1].item()


@pytest.mark.parametrize("loss_mode", ["vanilla", "gspo"])
def test_grpo_09_clip_table(loss_mode):
    table = [
        (1, 1.5, -1.28, 0), (1, 0.5, -0.5, -0.5), (-1, 1.5, 1.5, 1.5),
        (-1, 0.5, 0.8, 0), (-1, 5, 3.0, 0), (1, 5, -1.28, 0),
    ]  # fmt: skip
    settings = PolicyLossSettings(loss_mode, clip_ratio_high=0.28)
    for advantage, ratio, loss, slope in table:
        result, gradient = one_token(settings, math.log(ratio), advantage=advantage)
        assert result.loss.item() == pytest.approx(loss, rel=1e-6)
        assert gradient == pytest.approx(slope, rel=1e-6)
    without = PolicyLossSettings(loss_mode, clip_ratio_high=0.28, clip_ratio_c=None)
    assert one_token(without, math.log(5), advantage=-1)[0].loss.item() == pytest.approx(
        5, rel=1e-6
    )


@pytest.mark.parametrize("loss_mode", MODES)
def test_the_gradient_is_finite_at_the_clamps_and_0_beyond(loss_mode):
    settings = PolicyLossSettings(
        loss_mode, clip_ratio_low=1.0, clip_ratio_high=1e12, clip_ratio_c=None
    )
    for logprob in (-math.inf, -1e4, -20.5, -20.0, 20.0, 20.5, 1e4):
        result, gradient = one_token(settings, logprob, advantage=0.5)
        ratio = math.exp(min(max(logprob, -20), 20))
        assert result.ratio_max.item() == pytest.approx(ratio, rel=1e-12)
        beyond = abs(logprob) > 20 and loss_mode != "cispo"
        assert gradient == (0 if beyond else pytest.approx(-0.5 * ratio, rel=1e-6))


def test_the_kl_is_bounded_and_its_gradient_ends_at_the_bound():
    settings = PolicyLossSettings(kl_loss_type="k3", kl_loss_coef=1.0)
    top = math.exp(20) - 21
    for r, value, slope in [
        (20, top, 1 - math.exp(20)),
        (20.5, top, 0),
        (1e6, top, 0),
        (-1e6, 1e6 - 1, 1),
    ]:
        result, gradient = one_token(settings, 0.0, ref=r, advantage=0.0)
        assert result.metrics["loss/kl"].item() == pytest.approx(value, rel=1e-12)
        assert gradient == pytest.approx(slope, rel=1e-6)


@pytest.mark.parametrize("sign", [1, -1])
def test_k3_has_its_digits_for_small_differences(sign):
    getcontext().prec = 60
    settings = PolicyLossSettings(kl_loss_type="k3", kl_loss_coef=1.0)
    # Both sides of the point where the series ends are among them.
    for size in (1e-7, 1e-6, 1e-4, 1e-2, 0.3, 0.4999, 0.5001, 1.0, 3.0, 10.0):
        d = torch.tensor(sign * size).item()
        exact = Decimal(d).exp() - 1 - Decimal(d)
        result, gradient = one_token(settings, 0.0, ref=d, advantage=0.0)
        value = result.metrics["policy/kl_to_reference"].item()
        assert float(abs(Decimal(value) / exact - 1)) < 1e-14
        assert gradient == pytest.approx(-float(Decimal(d).exp() - 1), rel=1.2e-7)


@pytest.mark.parametrize("entropy_coef", [0.0, 0.5])
def test_the_gradient_is_times_what_comes_from_above(entropy_coef):
    settings = PolicyLossSettings(entropy_coef=entropy_coef)
    _, once = one_token(settings, 0.1)
    _, twice = one_token(settings, 0.1, upstream=-2.0)
    assert once != 0 and twice == -2 * once


def test_gspo_tokens_of_a_sequence_share_ratio_and_gradient():
    # Advantages of both signs in one sequence: only some of them are bounded.
    batch = packed([[0, 1, 1, 1]], old_logprobs=[0.0] * 4, advantages=[9.0, 1.0, -1.0, 0.5])
    logprobs = torch.tensor([9.0, 0.9, 0.3, 0.3])
    settings = PolicyLossSettings("gspo", clip_ratio_c=None)
    got = run_kernel(settings, batch, logprobs, torch.zeros(4))
    ratio = math.exp(0.5)
    assert got.loss == pytest.approx((-1.2 + ratio - 0.5 * 1.2) / 3, rel=1e-6)
    assert got.gradient.tolist() == pytest.approx([0.0] + [ratio / 9] * 3, rel=1e-6)
    assert got.metrics["policy/ratio_mean"] == pytest.approx(ratio, rel=1e-6)


def test_bounds_are_float64_numbers():
    # 1 + 0.2 in float32 is 1.2000000477; a ratio between the two is told apart by its side.
    ratios = [1.2 + 2e-8, 1.2 - 2e-8]
    settings = PolicyLossSettings(clip_ratio_c=None)
    low, high = (torch.tensor([math.log(r)], dtype=torch.float64) for r in sorted(ratios))
    one, bounds = torch.ones(1), torch.tensor([0, 1])
    for logprob, clipped in ((low, 0.0), (high, 1.0)):
        result = policy_loss(settings, logprob, one, 0 * logprob, one, one, None, bounds, 1.0)
        assert result.metrics["policy/clip_fraction_high"].item() == clipped


def test_every_metric_has_a_place():
    assert len(set(METRICS)) == len(METRICS)
    assert all(a != b for a, b in pairwise(METRICS))
