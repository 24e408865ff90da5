import inspect
import math

import pytest
import torch

from rl_megatron.config.loss import GRPOLossConfig
from rl_megatron.errors import ConfigError
from rl_megatron.losses.aggregate import LOSS_AGG_MODES
from rl_megatron.losses.grpo import LOSS_MODES, grpo_objective
from tests.helpers.packed import packed, random_masks, run_objective

SPLITS = [
    [[0, 1, 2, 3, 4, 5]],
    [[i] for i in range(6)],
    [[5, 0], [3], [1, 4, 2]],
    [[0, 1, 2], [3, 4, 5], []],
]


def random_batch(seed=0, empty=()):
    """Six sequences with log-ratios wide enough that every kind of clipping occurs."""
    masks = random_masks(seed, 6, empty)
    generator = torch.Generator().manual_seed(seed + 1)
    num_tokens = sum(len(mask) for mask in masks)
    logprobs, old, ref = (-3 * torch.rand(3, num_tokens, generator=generator)).unbind()
    advantages = 2 * torch.randn(num_tokens, generator=generator)
    entropy = torch.rand(num_tokens, generator=generator)
    batch = packed(masks, old_logprobs=old, ref_logprobs=ref, advantages=advantages)
    return batch, logprobs, entropy


def oracle(batch, logprobs, entropy, low, high, c, kl_coef):
    """Token-mean loss with k3, its metrics and gradient, in plain Python from the definitions."""
    rows = [
        [float(x) for x in row]
        for row in zip(
            logprobs, batch.old_logprobs, batch.ref_logprobs, batch.advantages, entropy, strict=True
        )
    ]
    counted = [i for i, m in enumerate(batch.response_mask.tolist()) if m]
    num = len(counted)
    sums = dict.fromkeys(
        ["policy", "kl", "clip_low", "clip_high", "clip_dual", "ratio", "approx", "entropy"], 0.0
    )
    gradient = [0.0] * len(rows)
    for i in counted:
        now, old, ref, advantage, entropy_i = rows[i]
        ratio = math.exp(now - old)
        plain = -advantage * ratio
        clipped = -advantage * min(max(ratio, 1 - low), 1 + high)
        loss = max(plain, clipped)
        slope = plain if plain >= clipped else 0.0
        dual = advantage < 0 and loss > -advantage * c
        if dual:
            loss, slope = -advantage * c, 0.0
        r = ref - now
        sums["policy"] += loss
        sums["kl"] += math.exp(r) - 1 - r
        sums["clip_low"] += clipped > plain and advantage < 0
        sums["clip_high"] += clipped > plain and advantage > 0
        sums["clip_dual"] += dual
        sums["ratio"] += ratio
        sums["approx"] += math.exp(now - old) - 1 - (now - old)
        sums["entropy"] += entropy_i
        gradient[i] = (slope + kl_coef * (1 - math.exp(r))) / num
    return {name: value / num for name, value in sums.items()}, gradient


def test_loss_metrics_and_gradient_against_plain_python():
    batch, logprobs, entropy = random_batch(empty=(2,))
    objective = grpo_objective(
        max_response_tokens=8,
        clip_ratio_low=0.2,
        clip_ratio_high=0.28,
        clip_ratio_c=3.0,
        use_kl_loss=True,
        kl_loss_coef=0.25,
        kl_loss_type="k3",
    )
    expected, gradient = oracle(batch, logprobs, entropy, 0.2, 0.28, 3.0, 0.25)
    outcome = run_objective(objective, batch, logprobs, entropy=entropy)
    assert all(expected[name] > 0 for name in ("clip_low", "clip_high", "clip_dual"))
    assert outcome.loss == pytest.approx(expected["policy"] + 0.25 * expected["kl"], rel=1e-6)
    assert outcome.gradient.tolist() == pytest.approx(gradient, rel=1e-5, abs=1e-9)
    ratios = (logprobs.double() - batch.old_logprobs.double()).exp()[batch.response_mask]
    assert outcome.metrics == {
        "loss/policy": pytest.approx(expected["policy"], rel=1e-6),
        "loss/kl": pytest.approx(expected["kl"], rel=1e-6),
        "policy/clip_fraction_low": pytest.approx(expected["clip_low"]),
        "policy/clip_fraction_high": pytest.approx(expected["clip_high"]),
        "policy/clip_fraction_dual": pytest.approx(expected["clip_dual"]),
        "policy/ratio_mean": pytest.approx(expected["ratio"]),
        "policy/ratio_max": pytest.approx(float(ratios.max())),
        "policy/approx_kl": pytest.approx(expected["approx"]),
        "policy/entropy": pytest.approx(expected["entropy"]),
        "policy/kl_to_reference": pytest.approx(expected["kl"]),
    }


@pytest.mark.parametrize("loss_mode", LOSS_MODES)
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("empty", [(), (1, 4)])
def test_same_numbers_however_the_mini_batch_is_split(mode, empty, loss_mode):
    batch, logprobs, entropy = random_batch(seed=5, empty=empty)
    objective = grpo_objective(
        max_response_tokens=9,
        loss_mode=loss_mode,
        loss_agg_mode=mode,
        use_kl_loss=True,
        kl_loss_coef=0.1,
        entropy_coef=0.3,
    )
    whole, *others = (run_objective(objective, batch, logprobs, s, entropy) for s in SPLITS)
    for other in others:
        assert other.loss == pytest.approx(whole.loss, rel=1e-12)
        assert other.metrics == pytest.approx(whole.metrics, rel=1e-12)
        assert torch.equal(other.gradient, whole.gradient)
        assert torch.equal(other.entropy_gradient, whole.entropy_gradient)


def sequences_of(batch):
    """The counted tokens of each sequence that has any."""
    bounds, mask = batch.cu_seqlens.tolist(), batch.response_mask.tolist()
    spans = (range(a, b) for a, b in zip(bounds, bounds[1:], strict=False))
    return [tokens for span in spans if (tokens := [t for t in span if mask[t]])]


def test_gspo_against_plain_python():
    batch, logprobs, _ = random_batch(seed=2, empty=(3,))
    # One advantage per response, as GRPO gives it.
    per_sequence = torch.tensor([1.5, -0.5, -2.0, 9.0, 0.75, -1.0])
    batch = batch.with_fields(advantages=per_sequence[batch.segment_ids])
    sequences = sequences_of(batch)
    loss, gradient, low, high = 0.0, [0.0] * batch.num_tokens, 0, 0
    for tokens in sequences:
        advantage = float(batch.advantages[tokens[0]])
        log_ratios = [float(logprobs[t]) - float(batch.old_logprobs[t]) for t in tokens]
        ratio = math.exp(sum(log_ratios) / len(tokens))
        clipped = min(max(ratio, 0.9), 1.15)
        loss -= min(ratio * advantage, clipped * advantage) / len(sequences)
        if ratio * advantage <= clipped * advantage:
            for t in tokens:
                gradient[t] = -advantage * ratio / len(tokens) / len(sequences)
        low += len(tokens) * (ratio < 0.9 and advantage < 0)
        high += len(tokens) * (ratio > 1.15 and advantage > 0)
    objective = grpo_objective(
        max_response_tokens=8,
        loss_mode="gspo",
        loss_agg_mode="seq-mean-token-mean",
        clip_ratio_low=0.1,
        clip_ratio_high=0.15,
        clip_ratio_c=None,
    )
    outcome = run_objective(objective, batch, logprobs)
    num_tokens = sum(map(len, sequences))
    assert low and high and any(gradient)
    assert outcome.loss == pytest.approx(loss, rel=1e-6)
    assert outcome.gradient.tolist() == pytest.approx(gradient, rel=1e-5, abs=1e-9)
    assert outcome.metrics["policy/clip_fraction_low"] == pytest.approx(low / num_tokens)
    assert outcome.metrics["policy/clip_fraction_high"] == pytest.approx(high / num_tokens)


def test_gspo_by_hand():
    # Two responses, ratios exp(0.3) and exp(-0.1) of advantages 1 and -2, no clipping in reach.
    batch = packed(
        [[0, 1, 1, 1], [0, 1]], old_logprobs=[0.0] * 6, advantages=[1.0] * 4 + [-2.0] * 2
    )
    objective = grpo_objective(
        max_response_tokens=8,
        loss_mode="gspo",
        loss_agg_mode="seq-mean-token-mean",
        clip_ratio_low=0.5,
        clip_ratio_high=0.5,
    )
    outcome = run_objective(objective, batch, torch.tensor([5.0, 0.9, -0.3, 0.3, 5.0, -0.1]))
    assert outcome.loss == pytest.approx((-1.349859 + 2 * 0.904837) / 2, abs=1e-6)
    first, second = -1.349859 / 6, 0.904837
    expected = [0, first, first, first, 0, second]
    assert outcome.gradient.tolist() == pytest.approx(expected, abs=1e-6)


def test_cispo_against_plain_python():
    batch, logprobs, _ = random_batch(seed=3, empty=(0,))
    counted = [t for tokens in sequences_of(batch) for t in tokens]
    loss, gradient, low, high = 0.0, [0.0] * batch.num_tokens, 0, 0
    for t in counted:
        ratio = math.exp(float(logprobs[t]) - float(batch.old_logprobs[t]))
        weight = min(max(ratio, 0.6), 1.5)
        gradient[t] = -weight * float(batch.advantages[t]) / len(counted)
        loss += gradient[t] * float(logprobs[t])
        low, high = low + (ratio < 0.6), high + (ratio > 1.5)
    objective = grpo_objective(
        max_response_tokens=8, loss_mode="cispo", clip_ratio_low=0.4, clip_ratio_high=0.5
    )
    outcome = run_objective(objective, batch, logprobs)
    assert low and high
    assert outcome.loss == pytest.approx(loss, rel=1e-6)
    assert outcome.gradient.tolist() == pytest.approx(gradient, rel=1e-5, abs=1e-9)
    assert outcome.metrics["policy/clip_fraction_low"] == pytest.approx(low / len(counted))
    assert outcome.metrics["policy/clip_fraction_high"] == pytest.approx(high / len(counted))
    assert outcome.metrics["policy/clip_fraction_dual"] == 0


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_entropy_bonus_is_weighed_as_the_policy_loss(mode):
    batch, logprobs, entropy = random_batch(seed=6, empty=(5,))
    plain, bonus = (
        grpo_objective(max_response_tokens=8, loss_agg_mode=mode, entropy_coef=coef)
        for coef in (0.0, 0.25)
    )
    without = run_objective(plain, batch, logprobs, entropy=entropy)
    outcome = run_objective(bonus, batch, logprobs, entropy=entropy)
    weights = plain.weigh(batch).loss_weights
    expected = float((weights.double() * entropy.double()).sum())
    assert outcome.metrics["loss/entropy"] == pytest.approx(expected, rel=1e-6)
    assert outcome.loss == pytest.approx(without.loss - 0.25 * expected, rel=1e-9)
    assert torch.allclose(outcome.entropy_gradient, -0.25 * weights)
    assert torch.equal(outcome.gradient, without.gradient)
    assert without.entropy_gradient is None and "loss/entropy" not in without.metrics


@pytest.mark.parametrize("loss_mode", LOSS_MODES)
def test_all_modes_agree_at_ratio_1_in_gradient(loss_mode):
    batch, logprobs, _ = random_batch()
    batch = batch.with_fields(
        old_logprobs=logprobs, advantages=torch.linspace(-1, 1, 6)[batch.segment_ids]
    )
    objective = grpo_objective(max_response_tokens=8, loss_mode=loss_mode)
    outcome = run_objective(objective, batch, logprobs)
    num_tokens = batch.response_mask.sum()
    expected = torch.where(batch.response_mask, -batch.advantages / num_tokens, 0.0)
    assert torch.allclose(outcome.gradient, expected, rtol=1e-6, atol=1e-9)


def test_unknown_mode_is_refused():
    with pytest.raises(ConfigError, match=r"loss_mode: 'ppo'.*vanilla, gspo, cispo"):
        grpo_objective(max_response_tokens=8, loss_mode="ppo")


def test_grpo_08_micro_batch_without_a_valid_token():
    # Advantages of -0.25 and -0.75 at ratio 1 are per-token losses of 0.25 and 0.75.
    batch = packed(
        [[0, 0, 0], [0, 1, 1]],
        old_logprobs=[0.0] * 6,
        advantages=[9.0, 9.0, 9.0, 9.0, -0.25, -0.75],
    )
    objective = grpo_objective(max_response_tokens=8)
    outcome = run_objective(objective, batch, torch.zeros(6), [[0], [1]])
    assert outcome.loss == 0.5
    assert outcome.gradient.tolist() == [0.0, 0.0, 0.0, 0.0, 0.125, 0.375]
    assert outcome.metrics["policy/ratio_mean"] == 1.0


@pytest.mark.parametrize("loss_mode", LOSS_MODES)
def test_grpo_08_whole_batch_without_a_valid_token(loss_mode):
    batch = packed([[0, 0], [0, 0]], old_logprobs=[0.0] * 4, advantages=[1.0] * 4)
    objective = grpo_objective(max_response_tokens=8, loss_mode=loss_mode, entropy_coef=0.1)
    outcome = run_objective(objective, batch, torch.full((4,), math.nan), [[0], [1]])
    assert outcome.loss == 0.0
    assert outcome.gradient.tolist() == [0.0] * 4
    assert set(outcome.metrics.values()) == {0.0}


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("kl_loss_type", ["k1", "k2", "k3"])
@pytest.mark.parametrize("loss_mode", LOSS_MODES)
def test_grpo_08_what_is_under_mask_0_changes_no_bit(garbage, kl_loss_type, loss_mode):
    batch, logprobs, entropy = random_batch(seed=8, empty=(3,))
    objective = grpo_objective(
        max_response_tokens=8,
        loss_mode=loss_mode,
        use_kl_loss=True,
        kl_loss_type=kl_loss_type,
        allow_k1_loss=True,
        entropy_coef=0.1,
    )
    outside = ~batch.response_mask

    def spoilt(values):
        return values.masked_fill(outside, garbage)

    spoilt_batch = batch.with_fields(
        old_logprobs=spoilt(batch.old_logprobs),
        ref_logprobs=spoilt(batch.ref_logprobs),
        advantages=spoilt(batch.advantages),
    )
    clean = run_objective(objective, batch, logprobs, entropy=entropy)
    dirty = run_objective(objective, spoilt_batch, spoilt(logprobs), entropy=spoilt(entropy))
    assert dirty.loss == clean.loss
    assert dirty.metrics == clean.metrics
    assert torch.equal(dirty.gradient, clean.gradient)
    assert torch.equal(dirty.entropy_gradient, clean.entropy_gradient)
    assert not clean.gradient[outside].any() and not clean.entropy_gradient[outside].any()


@pytest.mark.parametrize("loss_mode", LOSS_MODES)
def test_garbage_in_a_valid_token_is_not_hidden(loss_mode):
    batch, logprobs, _ = random_batch()
    logprobs[batch.response_mask.nonzero()[0]] = math.nan
    objective = grpo_objective(max_response_tokens=8, loss_mode=loss_mode)
    outcome = run_objective(objective, batch, logprobs)
    assert math.isnan(outcome.loss)


def test_step_0_ratio_is_one_and_kl_is_zero():
    batch, logprobs, _ = random_batch()
    batch = batch.with_fields(old_logprobs=logprobs, ref_logprobs=logprobs)
    objective = grpo_objective(max_response_tokens=8, use_kl_loss=True)
    metrics = run_objective(objective, batch, logprobs).metrics
    assert metrics["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-12)
    assert metrics["policy/ratio_max"] == 1.0
    for name in ("loss/kl", "policy/approx_kl", "policy/kl_to_reference"):
        assert metrics[name] == 0.0
    assert metrics["policy/clip_fraction_low"] == metrics["policy/clip_fraction_high"] == 0.0


def test_lp_01_temperature_on_one_side_only_shows_at_step_0():
    def at(temperature):
        scaled = torch.log_softmax(torch.tensor([2.0, 1.0, 0.0]) / temperature, dim=0)
        return torch.cat([torch.zeros(1), scaled])

    assert at(0.5)[1:].tolist() == pytest.approx([-0.142932, -2.142932, -4.142932], abs=1e-6)
    batch = packed([[0, 1, 1, 1]], advantages=[0.0] * 4)
    objective = grpo_objective(max_response_tokens=8)
    ratio = {
        (new, old): run_objective(
            objective, batch.with_fields(old_logprobs=at(old)), at(new)
        ).metrics["policy/ratio_mean"]
        for new in (0.5, 0.7, 1.0)
        for old in (0.5, 0.7, 1.0)
    }
    for (new, old), value in ratio.items():
        assert (value == pytest.approx(1.0, abs=1e-6)) == (new == old)


def test_grpo_05_zero_advantages_leave_the_kl_its_gradient():
    batch, logprobs, _ = random_batch()
    batch = batch.with_fields(advantages=torch.zeros_like(logprobs))
    without = run_objective(grpo_objective(max_response_tokens=8), batch, logprobs)
    assert not without.gradient.any()
    objective = grpo_objective(max_response_tokens=8, use_kl_loss=True, kl_loss_coef=0.1)
    outcome = run_objective(objective, batch, logprobs)
    r = batch.ref_logprobs.double() - logprobs.double()
    expected = torch.where(batch.response_mask, 0.1 * (1 - r.exp()), 0.0)
    expected = expected / batch.response_mask.sum()
    assert torch.allclose(outcome.gradient.double(), expected, rtol=1e-6)


def test_grpo_06_k1_as_a_loss_needs_to_be_asked_for():
    with pytest.raises(ConfigError, match=r"kl_loss_type.*k2.*allow_k1_loss"):
        grpo_objective(max_response_tokens=8, use_kl_loss=True, kl_loss_type="k1")
    grpo_objective(max_response_tokens=8, use_kl_loss=True, kl_loss_type="k1", allow_k1_loss=True)
    grpo_objective(max_response_tokens=8, use_kl_loss=False, kl_loss_type="k1")


def test_without_reference_there_is_no_kl():
    batch, logprobs, _ = random_batch()
    batch = batch.with_fields(ref_logprobs=None)
    metrics = run_objective(grpo_objective(max_response_tokens=8), batch, logprobs).metrics
    assert "policy/kl_to_reference" not in metrics and "loss/kl" not in metrics
    with pytest.raises(AssertionError, match="ref_logprobs"):
        run_objective(grpo_objective(max_response_tokens=8, use_kl_loss=True), batch, logprobs)


def test_the_number_is_the_configured_one_not_the_longest_response():
    batch = packed([[0, 1, 1]], old_logprobs=[0.0] * 3, advantages=[-1.0] * 3)
    objective = grpo_objective(max_response_tokens=8, loss_agg_mode="seq-mean-token-sum-norm")
    assert run_objective(objective, batch, torch.zeros(3)).loss == 0.25


def test_keywords_and_defaults_are_those_of_the_configuration():
    parameters = inspect.signature(grpo_objective).parameters
    others = ("max_response_tokens", "implementation")
    defaults = {k: p.default for k, p in parameters.items() if k not in others}
    assert defaults == GRPOLossConfig().model_dump()
