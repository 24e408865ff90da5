import math
from typing import get_args

import pytest
import torch

from rl_megatron.kernels.preference_loss import LossType, PreferenceLossSettings, preference_loss
from rl_megatron.kernels.preference_loss.door import PAIRS_BLOCK, TOKENS_BLOCK
from rl_megatron.losses import dpo_objective, totals
from tests.helpers.packed import Outcome, packed, random_masks, run_objective


def random_pairs(masks, seed=0, spread=3.0):
    generator = torch.Generator().manual_seed(seed + 1)
    num_tokens = sum(map(len, masks))
    logprobs, ref = (-spread * torch.rand(2, num_tokens, generator=generator)).unbind()
    return packed(masks, paired=True, ref_logprobs=ref), logprobs


def objective_of(settings):
    """The definition with the same numbers."""
    return dpo_objective(
        beta=settings.beta,
        loss_type=settings.loss_type,
        label_smoothing=settings.label_smoothing,
        simpo_gamma=settings.simpo_gamma,
        rpo_alpha=settings.rpo_alpha,
    )


def run_kernel(settings, batch, logprobs, parts=None):
    """The kernel over the mini-batch, as `run_objective` runs the definition."""
    batch = objective_of(settings).weigh(batch)
    scale = 1 / max(totals(batch).num_pairs, 1)
    leaf = logprobs.clone().requires_grad_()
    loss, metrics = 0.0, {}
    for part in [range(batch.num_sequences)] if parts is None else parts:
        some, index = batch.select(part), batch.token_index(part)
        result = preference_loss(
            settings, leaf[index], some.ref_logprobs, some.loss_weights, some.cu_seqlens, scale
        )
        result.loss.backward()
        loss += result.loss.item()
        for name, value in result.metrics.items():
            assert value.dtype == torch.float64 and not value.requires_grad
            metrics[name] = metrics.get(name, 0.0) + value.item()
    return Outcome(loss, metrics, leaf.grad, None)


def assert_equal(got, want):
    """Equal but for the last digits of float64, and of float32 where gradients are stored."""
    assert got.loss == pytest.approx(want.loss, rel=1e-12, abs=1e-15)
    assert got.metrics == pytest.approx(want.metrics, rel=1e-12, abs=1e-15)
    assert torch.allclose(got.gradient, want.gradient, rtol=1.2e-7, atol=0)


# Small and large margins, of which hinge has some on both sides of its bend.
@pytest.mark.parametrize("spread", [0.01, 3.0, 100.0])
@pytest.mark.parametrize("loss_type", get_args(LossType))
def test_equals_the_definition(loss_type, spread):
    settings = PreferenceLossSettings(
        beta=0.3,
        loss_type=loss_type,
        label_smoothing=0.2,
        simpo_gamma=0.7,
        rpo_alpha=None if loss_type in ("hinge", "ipo") else 0.5,
    )
    masks = [*random_masks(1, 6, empty=(2,)), [], [0, 1]]
    batch, logprobs = random_pairs(masks, spread=spread)
    got = run_kernel(settings, batch, logprobs)
    assert got.gradient.any()
    assert_equal(got, run_objective(objective_of(settings), batch, logprobs))


def test_without_label_smoothing_and_likelihood():
    batch, logprobs = random_pairs(random_masks(2, 6))
    want = run_objective(objective_of(PreferenceLossSettings()), batch, logprobs)
    assert_equal(run_kernel(PreferenceLossSettings(), batch, logprobs), want)


@pytest.mark.parametrize("loss_type", ["simpo", "orpo"])
def test_a_loss_without_reference_does_not_look_at_it(loss_type):
    settings = PreferenceLossSettings(loss_type=loss_type)
    batch, logprobs = random_pairs(random_masks(2, 4))
    without = run_kernel(settings, batch.with_fields(ref_logprobs=None), logprobs)
    spoilt = batch.with_fields(ref_logprobs=torch.full_like(logprobs, math.nan))
    assert run_kernel(settings, spoilt, logprobs).metrics == without.metrics


def test_several_blocks_and_micro_batches():
    settings = PreferenceLossSettings(rpo_alpha=1.0)
    lengths = [TOKENS_BLOCK + 30, 5] + [2] * (2 * PAIRS_BLOCK + 4)
    batch, logprobs = random_pairs([[0] + [1] * (n - 1) for n in lengths])
    want = run_objective(objective_of(settings), batch, logprobs)
    assert_equal(run_kernel(settings, batch, logprobs), want)
    few, some = random_pairs([[0] + [1] * (n - 1) for n in lengths[:6]])
    want = run_objective(objective_of(settings), few, some)
    assert_equal(run_kernel(settings, few, some, [[4, 5], [], [0, 1, 2, 3]]), want)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_grpo_08_what_is_under_weight_0_changes_no_bit(garbage):
    settings = PreferenceLossSettings(rpo_alpha=0.5)
    batch, logprobs = random_pairs(random_masks(8, 6, empty=(3,)))
    outside = ~batch.response_mask
    # The other side of a pair that is not valid does not count either.
    outside |= batch.segment_ids == 2
    spoilt = batch.with_fields(ref_logprobs=batch.ref_logprobs.masked_fill(outside, garbage))
    clean = run_kernel(settings, batch, logprobs)
    dirty = run_kernel(settings, spoilt, logprobs.masked_fill(outside, garbage))
    assert dirty.loss == clean.loss and dirty.metrics == clean.metrics
    assert torch.equal(dirty.gradient, clean.gradient) and not clean.gradient[outside].any()


@pytest.mark.parametrize("masks", [[], [[], []], [[0], [0, 0]], [[0, 1], [0]]])
def test_grpo_08_nothing_counts(masks):
    batch, logprobs = random_pairs(masks)
    nothing = torch.full_like(logprobs, math.nan)
    got = run_kernel(PreferenceLossSettings(rpo_alpha=1.0), batch, nothing)
    assert got.loss == 0 and set(got.metrics.values()) == {0.0}
    assert torch.equal(got.gradient, torch.zeros_like(logprobs))


def test_garbage_in_a_token_that_counts_is_not_hidden():
    batch, logprobs = random_pairs(random_masks(0, 4))
    logprobs[batch.response_mask.nonzero()[0]] = math.nan
    assert math.isnan(run_kernel(PreferenceLossSettings(), batch, logprobs).loss)


def one_token_pairs(*sums):
    """(policy chosen, policy rejected, reference chosen, rejected) of responses of one token."""
    policy, reference = [], []
    for chosen, rejected, ref_chosen, ref_rejected in sums:
        policy += [0.0, chosen, 0.0, rejected]
        reference += [0.0, ref_chosen, 0.0, ref_rejected]
    batch = packed([[0, 1]] * (2 * len(sums)), paired=True, ref_logprobs=reference)
    return batch, torch.tensor(policy)


def test_dpo_09_an_invalid_pair_counts_neither_above_nor_below_the_line():
    batch, logprobs = one_token_pairs(*[(-12.0, -20.0, -14.0, -18.0)] * 2, (0.0, 0.0, 0.0, 0.0))
    mask = batch.response_mask.clone()
    mask[-1] = False
    batch = batch.with_fields(response_mask=mask)
    whole = run_kernel(PreferenceLossSettings(), batch, logprobs)
    split = run_kernel(PreferenceLossSettings(), batch, logprobs, [[0, 1, 2, 3], [4, 5]])
    assert whole.loss == pytest.approx(0.513015, abs=1e-6)
    assert split.loss == pytest.approx(whole.loss, rel=1e-15)


@pytest.mark.parametrize(
    ("loss_type", "loss"), [("sigmoid", 0.513015), ("hinge", 0.6), ("ipo", 18.49)]
)
def test_dpo_10_sums_and_not_averages(loss_type, loss):
    masks = [[0] + [1] * 4, [0] + [1] * 10]
    policy = [0.0] + [-3.0] * 4 + [0.0] + [-2.0] * 10
    reference = [0.0] + [-3.5] * 4 + [0.0] + [-1.8] * 10
    batch = packed(masks, paired=True, ref_logprobs=reference)
    got = run_kernel(PreferenceLossSettings(loss_type=loss_type), batch, torch.tensor(policy))
    assert got.loss == pytest.approx(loss, rel=2e-6)
    if loss_type != "ipo":
        assert got.metrics["logps/chosen"] == -12 and got.metrics["logps/rejected"] == -20
        assert got.metrics["rewards/margins"] == pytest.approx(0.4, rel=1e-6)


def test_dpo_13_boundaries_of_packed_sequences():
    masks = [[0, 1, 1], [0, 1], [0, 0, 1, 1], [0, 1]]
    policy = [-99.0, -0.5, -0.25, -99.0, -1.0, -99.0, -7.0, -2.0, -0.125, -99.0, -4.0]
    batch = packed(masks, paired=True, ref_logprobs=[0.0] * 11)
    got = run_kernel(PreferenceLossSettings(), batch, torch.tensor(policy))
    assert got.metrics["logps/chosen"] == (-0.75 - 2.125) / 2
    assert got.metrics["logps/rejected"] == (-1.0 - 4.0) / 2


@pytest.mark.parametrize("label_smoothing", [0.0, 0.3])
def test_dpo_14_at_step_0_the_loss_is_ln_2(label_smoothing):
    batch, logprobs = random_pairs(random_masks(4, 6))
    batch = batch.with_fields(ref_logprobs=logprobs)
    settings = PreferenceLossSettings(label_smoothing=label_smoothing)
    got = run_kernel(settings, batch, logprobs)
    assert got.loss == pytest.approx(math.log(2), rel=1e-15)
    assert got.metrics["rewards/margins"] == 0 and got.metrics["rewards/accuracies"] == 0


def test_lp_06_a_long_response_of_bf16_values():
    values = torch.full((4096,), -0.01).bfloat16().float()
    masks = [[0] + [1] * 4096, [0, 1]]
    logprobs = torch.cat([torch.zeros(1), values, torch.zeros(2)])
    batch = packed(masks, paired=True, ref_logprobs=torch.zeros(4099))
    got = run_kernel(PreferenceLossSettings(), batch, logprobs)
    assert got.metrics["logps/chosen"] == -41.0


def test_the_gradient_is_times_what_comes_from_above():
    batch, logprobs = one_token_pairs((-1.0, -2.0, -1.5, -1.5))
    weights = batch.response_mask.float()
    gradients = []
    for upstream in (1.0, -2.0):
        leaf = logprobs.clone().requires_grad_()
        result = preference_loss(
            PreferenceLossSettings(), leaf, batch.ref_logprobs, weights, batch.cu_seqlens, 1.0
        )
        (result.loss * upstream).backward()
        gradients.append(leaf.grad)
    assert gradients[0].any() and torch.equal(gradients[1], -2 * gradients[0])
