"""How exact the fused head is at the sizes of a real one; a row depends on itself alone."""

import functools

import numpy
import pytest
import torch

from rl_megatron.kernels.linear_logprob import linear_logprob, tiles
from rl_megatron.kernels.linear_logprob.cpu_rows import CpuRows
from rl_megatron.kernels.linear_logprob.reference import plain_logprob
from tests.helpers.head_problem import (
    CASES,
    USED,
    gradients,
    head_problem,
    largest_relative,
    relative,
    temperature_of,
)

ROWS, WIDTH, VOCAB = 70, 576, 5003


@pytest.fixture(params=["torch", "cpu"])
def head(request):
    return functools.partial(linear_logprob, implementation=request.param)


def problem(rows=ROWS, width=WIDTH, vocab=VOCAB, dtype=torch.float32):
    return head_problem(rows, width, vocab, dtype)


@pytest.mark.parametrize("used", USED)
@pytest.mark.parametrize("case", CASES)
def test_float32_against_float64(head, case, used):
    hidden, weight, targets, upstream = problem()
    upstream = tuple(g * on for g, on in zip(upstream, USED[used], strict=True))
    temperature, softcap = temperature_of(case, ROWS), CASES[case][1]
    logprob, entropy = head(hidden, weight, targets, temperature, VOCAB, softcap=softcap)
    exact = plain_logprob(hidden, weight, targets, temperature, VOCAB, softcap, dtype=torch.float64)
    assert largest_relative(logprob, exact[0]) <= 3e-7
    assert largest_relative(entropy, exact[1]) <= 1e-6
    found = gradients((logprob, entropy), upstream, [hidden, weight])
    for value, want in zip(found, gradients(exact, upstream, [hidden, weight]), strict=True):
        assert want.norm() > 0
        assert relative(value, want) <= 2e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_half_precision_inputs_lose_nothing_but_their_own_rounding(head, dtype, case):
    hidden, weight, targets, upstream = problem(dtype=dtype)
    temperature, softcap = temperature_of(case, ROWS), CASES[case][1]
    logprob, entropy = head(hidden, weight, targets, temperature, VOCAB, softcap=softcap)
    assert logprob.dtype == entropy.dtype == torch.float32
    exact = plain_logprob(hidden, weight, targets, temperature, VOCAB, softcap, dtype=torch.float64)
    assert (logprob - exact[0]).abs().max() <= 5e-6
    assert (entropy - exact[1]).abs().max() <= 1e-5
    found = gradients((logprob, entropy), upstream, [hidden, weight])
    wide = [leaf.detach().double().requires_grad_() for leaf in (hidden, weight)]
    exact = plain_logprob(*wide, targets, temperature, VOCAB, softcap)
    for value, want in zip(found, gradients(exact, upstream, wide), strict=True):
        assert value.dtype == dtype
        # Half a step of the result: it is rounded once.
        torch.testing.assert_close(
            value.double(), want, rtol=torch.finfo(dtype).eps / 2 * 1.01, atol=2e-7
        )


def test_a_float32_head_of_half_precision_hidden_states(head):
    hidden, weight, targets, upstream = problem()
    hidden = hidden.detach().bfloat16().requires_grad_()
    values = head(hidden, weight, targets, 1.0, VOCAB)
    exact = plain_logprob(hidden, weight, targets, 1.0, VOCAB, dtype=torch.float64)
    assert largest_relative(values[0], exact[0]) <= 3e-7
    d_hidden, d_weight = gradients(values, upstream, [hidden, weight])
    assert (d_hidden.dtype, d_weight.dtype) == (torch.bfloat16, torch.float32)
    assert relative(d_weight, gradients(exact, upstream, [weight])[0]) <= 2e-6


# Rows of a chunk, and what is left over: nothing, one row, all but one.
@pytest.mark.parametrize("rows", [16, 32, 48, 64, 1024])
def test_a_row_is_the_same_to_the_bit_in_any_chunk(head, monkeypatch, rows):
    hidden, weight, targets, _ = problem(rows=97)
    with torch.no_grad():
        whole = head(hidden, weight, targets, 0.7, VOCAB)
        monkeypatch.setattr(tiles, "CPU_TILES", tiles.CPU_TILES._replace(rows=rows))
        chunked = head(hidden, weight, targets, 0.7, VOCAB)
    assert all(torch.equal(a, b) for a, b in zip(chunked, whole, strict=True))


def test_a_row_is_the_same_to_the_bit_in_any_company(head):
    hidden, weight, targets, _ = problem(rows=61)
    order = torch.randperm(61, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        whole = head(hidden, weight, targets, 0.7, VOCAB)
        shuffled = head(hidden[order], weight, targets[order], 0.7, VOCAB)
        some = torch.where(torch.arange(61) % 3 == 0, targets, -1)
        packed = head(hidden, weight, some, 0.7, VOCAB)
        alone = [head(hidden[i : i + 1], weight, targets[i : i + 1], 0.7, VOCAB) for i in range(61)]
    for k in range(2):
        assert torch.equal(shuffled[k], whole[k][order])
        assert torch.equal(packed[k][::3], whole[k][::3])
        assert torch.equal(torch.cat([values[k] for values in alone]), whole[k])


def test_two_runs_are_equal_to_the_bit(head):
    results = []
    for _ in range(2):
        hidden, weight, targets, upstream = problem(dtype=torch.bfloat16)
        values = head(hidden, weight, targets, 1.0, VOCAB)
        results.append([*values, *gradients(values, upstream, [hidden, weight])])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("rows", [0, 1, 2, 17])
@pytest.mark.parametrize("vocab", [1, 2, 1023, 2049])
def test_odd_sizes(head, rows, vocab):
    hidden, weight, targets, upstream = problem(rows=rows, width=20, vocab=vocab)
    values = head(hidden, weight, targets, 1.0, vocab)
    exact = plain_logprob(hidden, weight, targets, 1.0, vocab, dtype=torch.float64)
    for value, want in zip(values, exact, strict=True):
        torch.testing.assert_close(value.double(), want, atol=2e-6, rtol=1e-6)
    found = gradients(values, upstream, [hidden, weight])
    for value, want in zip(found, gradients(exact, upstream, [hidden, weight]), strict=True):
        torch.testing.assert_close(value, want, atol=1e-5, rtol=1e-5)


def test_hidden_states_of_any_strides_and_targets_of_32_bits(head):
    hidden, weight, targets, upstream = problem(rows=24)
    plain = head(hidden, weight, targets, 1.0, VOCAB)
    expected = gradients(plain, upstream, [hidden, weight])
    # [batch, sequence, H] as seen from Megatron's [sequence, batch, H]: every other row.
    apart = torch.stack([hidden.detach(), torch.full_like(hidden, torch.nan)], dim=1)
    apart = apart.requires_grad_()
    values = head(apart[:, 0], weight, targets.int(), 1.0, VOCAB)
    assert all(torch.equal(a, b) for a, b in zip(values, plain, strict=True))
    d_apart, d_weight = gradients(values, upstream, [apart, weight])
    assert torch.equal(d_apart[:, 0], expected[0]) and not d_apart[:, 1].any()
    assert torch.equal(d_weight, expected[1])
    # Columns apart, too.
    columns = hidden.detach().t().contiguous().t().requires_grad_()
    values = head(columns, weight.t().contiguous().t(), targets, 1.0, VOCAB)
    assert all(torch.equal(a, b) for a, b in zip(values, plain, strict=True))


def test_a_sure_token_keeps_the_digits_of_its_gradient(head):
    # p = 1 - 1e-6: as p - 1 of a rounded p, nothing would be left of the gradient.
    weight = torch.tensor([[13.815511], [0.0]], requires_grad=True)
    logprob, _ = head(torch.ones(1, 1), weight, torch.tensor([0]), 1.0, 2)
    (d_weight,) = torch.autograd.grad(logprob.sum(), weight)
    assert d_weight[1].item() == pytest.approx(-1e-6, rel=1e-5)
    assert d_weight[0].item() == pytest.approx(1e-6, abs=6e-8)


def test_logits_far_below_zero_are_as_good_as_any(head):
    # The largest of them is no larger than -200: a maximum that starts at 0 would find inf.
    hidden, weight = torch.ones(1, 1), torch.tensor([[-200.0], [-201.0], [-300.0]])
    logprob, entropy = head(hidden, weight, torch.tensor([1]), 1.0, 3)
    assert logprob.item() == pytest.approx(-1.313262, abs=1e-6)
    assert entropy.item() == pytest.approx(0.582203, abs=1e-6)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_broken_row_is_seen_and_breaks_no_other(head, bad):
    hidden, weight, targets, upstream = problem(rows=9)
    broken = hidden.detach().clone()
    broken[4] = bad
    values = head(broken, weight, targets, 1.0, VOCAB)
    others = torch.arange(9) != 4
    assert values[0][4].isnan() and values[1][4].isnan()
    plain = head(hidden, weight, targets, 1.0, VOCAB)
    for value, want in zip(values, plain, strict=True):
        assert torch.equal(value[others], want[others])


def test_lp_05_rows_far_into_a_large_tile():
    # 151,936 columns: the first element of row 14,135 is number 2^31 and more. Memory that is never
    # written reads as zeros and takes no room, so only the rows that are looked at exist.
    rows, width = 14_138, 151_936
    tile = torch.from_numpy(numpy.zeros((rows, width), dtype=numpy.float32))
    last = tile[14_134:]
    last.copy_((torch.arange(4 * width) % 1009 * 1e-2).reshape(4, width))
    column = torch.zeros(rows, dtype=torch.int64)
    column[14_134:] = torch.arange(4) * 50_000
    kernels = CpuRows()
    found = kernels.statistics(tile, column, torch.ones(rows), None)
    alone = kernels.statistics(last.clone(), column[14_134:], torch.ones(4), None)
    assert torch.equal(found[:, 14_134:], alone)
    # The others are flat: e^0 a column, and no entropy missing.
    assert torch.equal(found[:, :14_134].unique(dim=1)[:, 0], torch.tensor([0.0, width, 0.0, 0.0]))
