"""Log-probs without logits against all logits in float64, on one process."""

import functools
import math

import pytest
import torch

from rl_megatron.errors import DataError
from rl_megatron.kernels.linear_logprob import linear_logprob, tiles
from rl_megatron.kernels.linear_logprob.reference import plain_logprob
from tests.helpers.head_problem import gradients


@pytest.fixture(params=["torch", "cpu"])
def head(request):
    """The head with each implementation that this machine can run in full."""
    return functools.partial(linear_logprob, implementation=request.param)


@pytest.fixture(params=["torch", "cpu", "reference"])
def any_head(request):
    """The same, and the oracle of the other tests, for what is worked by hand."""
    return functools.partial(linear_logprob, implementation=request.param)


def exact(hidden, weight, targets, temperature):
    """Log-probs and entropy by way of all logits in float64."""
    return plain_logprob(hidden, weight, targets, temperature, len(weight), dtype=torch.float64)


def problem(rows=37, width=16, vocab=131, seed=0, dtype=torch.float32):
    """Hidden states, head, targets (a fifth of them -1), and upstream gradients."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=generator)
    weight = torch.randn(vocab, width, generator=generator)
    targets = torch.randint(0, vocab, (rows,), generator=generator)
    targets[torch.rand(rows, generator=generator) < 0.2] = -1
    upstream = tuple(torch.randn(rows, generator=generator) for _ in range(2))
    return leaf(hidden.to(dtype)), leaf(weight.to(dtype)), targets, upstream


def leaf(tensor):
    return tensor.clone().requires_grad_()


def compare(values, expected, tolerance):
    for value, want in zip(values, expected, strict=True):
        torch.testing.assert_close(value.double(), want.double(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 5e-6)])
def test_values_and_gradients_are_those_of_all_logits(head, dtype, tolerance, temperature):
    hidden, weight, targets, upstream = problem(dtype=dtype)
    values = head(hidden, weight, targets, temperature, 131)
    oracle = exact(hidden, weight, targets, temperature)
    assert values[0].dtype == values[1].dtype == dtype
    compare(values, oracle, tolerance)
    inputs = [hidden, weight]
    compare(gradients(values, upstream, inputs), gradients(oracle, upstream, inputs), tolerance)


@pytest.mark.parametrize("used", [0, 1])
def test_log_prob_and_entropy_have_gradients_of_their_own(head, used):
    hidden, weight, targets, upstream = problem()
    inputs = [hidden, weight]
    pick = lambda values: torch.autograd.grad(  # noqa: E731
        (values[used].double() * upstream[used]).sum(), inputs
    )
    found = pick(head(hidden, weight, targets, 0.8, 131))
    expected = pick(exact(hidden, weight, targets, 0.8))
    assert all(g.abs().max() > 0.1 for g in expected)
    compare(found, expected, 5e-6)


def test_only_the_gradients_that_are_asked_for(head):
    hidden, weight, targets, upstream = problem()
    both = gradients(head(hidden, weight, targets, 1.0, 131), upstream, [hidden, weight])
    values = head(hidden.detach(), weight, targets, 1.0, 131)
    assert torch.equal(gradients(values, upstream, [weight])[0], both[1])
    values = head(hidden, weight.detach(), targets, 1.0, 131)
    assert torch.equal(gradients(values, upstream, [hidden])[0], both[0])


def test_chunks_do_not_change_the_numbers(head, monkeypatch):
    hidden, weight, targets, upstream = problem(rows=50)
    whole = head(hidden, weight, targets, 0.9, 131)
    whole_gradients = gradients(whole, upstream, [hidden, weight])
    monkeypatch.setattr(tiles, "CPU_TILES", tiles.CPU_TILES._replace(rows=16, columns=48))
    split = head(hidden, weight, targets, 0.9, 131)
    compare(split, whole, 1e-6)
    compare(gradients(split, upstream, [hidden, weight]), whole_gradients, 1e-5)


def test_bfloat16_inputs_are_computed_in_float32(head):
    hidden, weight, targets, upstream = problem(dtype=torch.bfloat16)
    values = head(hidden, weight, targets, 0.7, 131)
    assert values[0].dtype == values[1].dtype == torch.float32
    oracle = exact(hidden, weight, targets, 0.7)
    # Far below the steps of bfloat16 (2^-7 of a value): products and sums are exact enough.
    compare(values, oracle, 1e-5)
    found = gradients(values, upstream, [hidden, weight])
    expected = gradients(oracle, upstream, [hidden, weight])
    assert [g.dtype for g in found] == [torch.bfloat16] * 2
    # The result is rounded once, at the end.
    for value, want in zip(found, expected, strict=True):
        torch.testing.assert_close(value, want, atol=1e-3, rtol=2**-7)


@pytest.mark.parametrize("garbage", [0.0, 1e30, math.nan, -math.inf])
def test_padding_rows_of_the_vocabulary_take_no_part(head, garbage):
    hidden, weight, targets, upstream = problem()
    plain = head(hidden, weight, targets, 1.0, 131)
    padded = leaf(torch.cat([weight.detach(), torch.full((13, 16), garbage)]))
    values = head(hidden, padded, targets, 1.0, 131)
    assert all(torch.equal(a, b) for a, b in zip(values, plain, strict=True))
    expected = gradients(plain, upstream, [hidden, weight])
    d_hidden, d_padded = gradients(values, upstream, [hidden, padded])
    assert torch.equal(d_hidden, expected[0])
    assert torch.equal(d_padded[:131], expected[1])
    assert torch.equal(d_padded[131:], torch.zeros(13, 16))


def test_lp_02_a_row_nobody_asks_for_gives_exactly_zero_whatever_it_holds(head):
    hidden, weight, targets, upstream = problem()
    skipped = targets < 0
    assert 0 < int(skipped.sum()) < len(targets)
    clean = gradients(head(hidden, weight, targets, 1.0, 131), upstream, [hidden, weight])
    broken = hidden.detach().clone()
    broken[skipped] = math.nan
    broken = leaf(broken)
    values = head(broken, weight, targets, 1.0, 131)
    assert torch.equal(values[0][skipped], torch.zeros(int(skipped.sum())))
    assert torch.equal(values[1][skipped], torch.zeros(int(skipped.sum())))
    d_hidden, d_weight = gradients(values, upstream, [broken, weight])
    assert torch.equal(d_hidden, clean[0]) and torch.equal(d_weight, clean[1])
    assert not d_hidden[skipped].any()


def test_a_row_without_gradient_costs_nothing_whatever_it_holds(head):
    hidden, weight, targets, (g_logprob, _) = problem()
    g_logprob[:10] = 0
    upstream = (g_logprob, torch.zeros_like(g_logprob))
    clean = gradients(head(hidden, weight, targets, 1.0, 131), upstream, [hidden, weight])
    broken = hidden.detach().clone()
    broken[:10] = math.inf
    broken = leaf(broken)
    logprobs, entropy = head(broken, weight, targets, 1.0, 131)
    loss = (logprobs[10:] * g_logprob[10:]).sum()
    d_hidden, d_weight = torch.autograd.grad(loss, [broken, weight])
    compare((d_hidden, d_weight), clean, 1e-6)


@pytest.mark.parametrize("targets", [[-1, -1, -1], []])
def test_no_rows_at_all_still_have_gradients(head, targets):
    hidden = leaf(torch.randn(len(targets), 4))
    weight = leaf(torch.randn(7, 4))
    values = head(hidden, weight, torch.tensor(targets, dtype=torch.int64), 1.0, 7)
    assert [v.tolist() for v in values] == [[0.0] * len(targets)] * 2
    d_hidden, d_weight = torch.autograd.grad(values[0].sum() + values[1].sum(), [hidden, weight])
    assert torch.equal(d_hidden, torch.zeros_like(hidden))
    assert torch.equal(d_weight, torch.zeros_like(weight))


@pytest.mark.parametrize(
    ("temperature", "expected"),
    [
        (1.0, [-0.407606, -1.407606, -2.407606]),
        (0.7, [-0.260118, -1.688690, -3.117261]),
        (0.5, [-0.142932, -2.142932, -4.142932]),
    ],
)
def test_lp_01_temperature(any_head, temperature, expected):
    hidden, weight = torch.ones(3, 1), torch.tensor([[2.0], [1.0], [0.0]])
    logprobs, _ = any_head(hidden, weight, torch.tensor([0, 1, 2]), temperature, 3)
    torch.testing.assert_close(logprobs, torch.tensor(expected), atol=1e-6, rtol=0)


def test_lp_06_bfloat16_logits_keep_their_tail(any_head):
    # One hidden unit: the logits are one 8.0 and 999 zeros.
    weight = torch.zeros(1000, 1, dtype=torch.bfloat16)
    weight[0] = 8.0
    hidden = torch.ones(2, 1, dtype=torch.bfloat16)
    logprobs, _ = any_head(hidden, weight, torch.tensor([0, 5]), 1.0, 1000)
    torch.testing.assert_close(logprobs, torch.tensor([-0.289026, -8.289026]), atol=1e-6, rtol=0)


def minus_infinity_problem():
    """Logits [0, 0, -inf]: the product overflows, as nothing finite could be that low."""
    hidden = leaf(torch.tensor([[1e20]]))
    weight = leaf(torch.tensor([[0.0], [0.0], [-1e20]]))
    return hidden, weight


def test_lp_09_a_logit_of_minus_infinity(any_head):
    hidden, weight = minus_infinity_problem()
    logprobs, entropy = any_head(hidden, weight, torch.tensor([0]), 1.0, 3)
    assert logprobs.item() == pytest.approx(-0.693147, abs=1e-6)
    assert entropy.item() == pytest.approx(0.693147, abs=1e-6)
    d_hidden, d_weight = torch.autograd.grad((logprobs + entropy).sum(), [hidden, weight])
    assert torch.isfinite(d_hidden).all() and torch.isfinite(d_weight).all()
    assert float(d_weight[2]) == 0.0
    torch.testing.assert_close(d_weight[:2, 0], torch.tensor([0.5e20, -0.5e20]))


def test_lp_09_a_row_of_minus_infinity_is_reported(any_head):
    hidden = torch.tensor([[1e20], [1.0]])
    weight = torch.tensor([[-1e20], [-2e20]])
    logprobs, entropy = any_head(hidden, weight, torch.tensor([0, 0]), 1.0, 2)
    assert math.isnan(logprobs[0]) and math.isnan(entropy[0])
    assert float(logprobs[1]) == 0.0 and float(entropy[1]) == 0.0


def test_large_logits_lose_no_precision(any_head):
    hidden = torch.tensor([[1.0]])
    weight = leaf(torch.tensor([[1e4], [1e4 - 1], [-1e4]]))
    logprobs, entropy = any_head(hidden, weight, torch.tensor([1]), 1.0, 3)
    assert logprobs.item() == pytest.approx(-1.313262, abs=1e-6)
    assert entropy.item() == pytest.approx(0.582203, abs=1e-6)
    (d_weight,) = torch.autograd.grad(logprobs.sum(), weight)
    torch.testing.assert_close(d_weight[:, 0], torch.tensor([-0.731059, 0.731059, 0.0]))


def test_a_target_that_no_row_of_the_head_speaks_for_is_refused(head):
    hidden, weight, targets, _ = problem()
    targets[3] = 131
    with pytest.raises(DataError, match="131"):
        head(hidden, torch.cat([weight, weight]), targets, 1.0, 131)


def test_a_log_prob_is_the_exact_one_to_the_last_float32(head):
    # Between 4 and 8 nats float32 are 4.8e-7 apart. Rounded once, most are half of that off at
    # most; rounded at every step of the way, they were 5.2e-7.
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(400, 8, generator=generator)
    weight = 0.1 * torch.randn(131, 8, generator=generator)
    targets = torch.randint(131, (400,), generator=generator)
    found, _ = head(hidden, weight, targets, 1.0, 131)
    exact, _ = head(hidden.double(), weight.double(), targets, 1.0, 131)
    assert -8 < exact.min() < exact.max() < -4
    assert (found.double() - exact).abs().max() < 4.3e-7
