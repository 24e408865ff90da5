"""The one-pass mode: the gradients of two passes, whatever was predicted, and less work for it."""

import functools

import pytest
import torch

from rl_megatron.kernels.linear_logprob import linear_logprob, tiles
from rl_megatron.kernels.linear_logprob.choose import row_kernels
from rl_megatron.kernels.linear_logprob.reference import plain_logprob
from tests.helpers.head_problem import gradients

ROWS, WIDTH, VOCAB = 75, 24, 517


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several tiles of rows and of the vocabulary, kept and not."""
    small = tiles.Tiles(rows=48, columns=200, kept_bytes=0, kept_rows=32)
    monkeypatch.setattr(tiles, "CPU_TILES", small)


@pytest.fixture(params=["torch", "cpu"])
def head(request):
    return functools.partial(linear_logprob, implementation=request.param)


def problem(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = (0.3 * torch.randn(VOCAB, WIDTH, generator=generator)).to(dtype).requires_grad_()
    targets = torch.randint(0, VOCAB - 7, (ROWS,), generator=generator)
    targets[torch.rand(ROWS, generator=generator) < 0.2] = -1
    g = torch.randn(2, ROWS, generator=generator)
    g[:, torch.rand(ROWS, generator=generator) < 0.2] = 0
    return hidden, weight, targets, g


def both(head, predicted, g, dtype=torch.float32, **kwargs):
    """Values and gradients of two passes and of one pass that expects `predicted`."""
    hidden, weight, targets, _ = problem(dtype)
    results = []
    for token_gradient in (None, lambda rows, *_: (predicted[0][rows], predicted[1][rows])):
        values = head(
            hidden, weight, targets, 0.7, VOCAB - 7, token_gradient=token_gradient, **kwargs
        )
        results.append([*values, *gradients(values, tuple(g), [hidden, weight])])
    return results


def compare(results, tolerance):
    two, one = results
    assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])
    for found, expected in zip(one[2:], two[2:], strict=True):
        assert (found - expected).norm() <= tolerance * expected.norm()


def changed(g, rows, by):
    g = g.clone()
    g[:, rows] = by(g[:, rows])
    return g


PREDICTIONS = {
    "right": lambda g: g,
    "wrong for some": lambda g: changed(g, slice(20, 30), lambda x: 2 * x + 1),
    "wrong for all": lambda g: 3 * g + 1,
    "nothing": torch.zeros_like,
    "only log-probs": lambda g: torch.stack([g[0], torch.zeros_like(g[1])]),
    "one row too many": lambda g: changed(g, slice(0, ROWS), lambda x: x + 1e-3 * (x == 0)),
}


@pytest.mark.parametrize("name", PREDICTIONS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-7), (torch.float64, 1e-14)])
def test_equal_to_two_passes_whatever_was_predicted(head, name, dtype, tolerance):
    g = problem()[3].to(dtype)
    compare(both(head, PREDICTIONS[name](g), g, dtype, softcap=5.0), tolerance)


def test_half_precision_is_rounded_once(head):
    g = problem()[3]
    two, one = both(head, g, g, torch.bfloat16)
    for found, expected in zip(one[2:], two[2:], strict=True):
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("name", PREDICTIONS)
def test_a_bfloat16_head_is_off_by_one_rounding_and_little_more(head, name, monkeypatch):
    """It is added up in 16 bits, a visit of a chunk each; one visit more mends what was missed."""
    monkeypatch.setattr(tiles, "CPU_TILES", tiles.CPU_TILES._replace(kept_rows=16))
    g = problem()[3]
    hidden, weight, targets, _ = problem(torch.bfloat16)
    predicted = PREDICTIONS[name](g)
    values = head(
        hidden, weight, targets, 1.0, VOCAB,
        token_gradient=lambda rows, *_: (predicted[0][rows], predicted[1][rows]),
    )  # fmt: skip
    (found,) = gradients(values, tuple(g), [weight])
    leaves = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    exact_values = plain_logprob(*leaves, targets, 1.0, VOCAB)
    (exact,) = gradients(exact_values, tuple(g.double()), leaves[1:])
    visits = -(-int((targets >= 0).sum()) // 16) + 1
    # A visit's rounding is of the sum as it was then, which may have been larger than the last.
    off = (found.double() - exact).abs() - 2**-8 * (1 + visits / 256) * exact.abs()
    assert off.max() <= visits * 2**-16 * exact.abs().max()


def test_a_gradient_that_does_not_come_leaves_nothing_in_its_row(head):
    hidden, weight, targets, g = problem()
    values = head(
        hidden, weight, targets, 1.0, VOCAB,
        token_gradient=lambda rows, *_: (g[0][rows] + 1, g[1][rows]),
    )  # fmt: skip
    only = torch.zeros_like(g[0])
    only[3] = g[0, 3] + 1
    assert targets[3] >= 0
    d_hidden, _ = gradients(values, (only, torch.zeros(ROWS)), [hidden, weight])
    assert d_hidden[3].any()
    assert not d_hidden[torch.arange(ROWS) != 3].any()


def test_the_prediction_sees_what_the_caller_gets(head):
    hidden, weight, targets, g = problem()
    seen = []

    def token_gradient(rows, logprob, entropy):
        assert rows.dtype == torch.int64
        seen.append((rows, logprob, entropy))
        return g[0][rows], g[1][rows]

    logprob, entropy = head(hidden, weight, targets, 1.0, VOCAB, token_gradient=token_gradient)
    rows = torch.cat([s[0] for s in seen])
    assert len(seen) > 1
    assert torch.equal(rows, torch.nonzero(targets >= 0)[:, 0])
    assert torch.equal(torch.cat([s[1] for s in seen]), logprob[rows].detach())
    assert torch.equal(torch.cat([s[2] for s in seen]), entropy[rows].detach())


def test_a_second_backward_pass_has_the_same_gradients(head):
    hidden, weight, targets, g = problem()
    values = head(
        hidden, weight, targets, 1.0, VOCAB,
        token_gradient=lambda rows, *_: (g[0][rows], g[1][rows]),
    )  # fmt: skip
    total = (values[0] * g[0] + values[1] * g[1]).sum()
    first = torch.autograd.grad(total, [hidden, weight], retain_graph=True)
    for tensor in first:
        tensor.add_(100.0)  # What was given away is the caller's.
    second = torch.autograd.grad(total, [hidden, weight])
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a - 100.0, b, atol=1e-5, rtol=1e-5)


def test_nobody_is_asked_where_no_gradient_is_wanted(head):
    hidden, weight, targets, _ = problem()

    def refuse(*_):
        raise AssertionError("asked")

    with torch.no_grad():
        head(hidden, weight, targets, 1.0, VOCAB, token_gradient=refuse)
    head(hidden.detach(), weight.detach(), targets, 1.0, VOCAB, token_gradient=refuse)


def count_products(monkeypatch, name):
    """Rows of every product with the kernels called `name`, by kind."""
    counts = {"logits": 0, "hidden": 0, "weight": 0}
    kernels = type(row_kernels(name, torch.device("cpu")))

    def counted(kind, method, height):
        original = getattr(kernels, method)

        def call(self, *args):
            counts[kind] += height(args)
            return original(self, *args)

        monkeypatch.setattr(kernels, method, call)

    counted("logits", "logits", lambda args: args[0].shape[0] * args[1].shape[0])
    counted("hidden", "hidden_gradient", lambda args: args[0].numel())
    counted("weight", "add_weight_gradient", lambda args: args[1].numel())
    return counts


@pytest.mark.parametrize("name", ["torch", "cpu"])
def test_work_is_done_for_rows_that_need_it_alone(monkeypatch, name):
    hidden, weight, targets, g = problem()
    asked = int((targets >= 0).sum())
    live = int(((targets >= 0) & (g[0] != 0)).sum())
    assert 0 < live < asked < ROWS

    def fill(n, chunk):
        return sum(-(-min(chunk, n - i) // 16) * 16 for i in range(0, n, chunk))

    counts = count_products(monkeypatch, name)
    values = linear_logprob(hidden, weight, targets, 1.0, VOCAB, implementation=name)
    gradients(values, tuple(g), [hidden, weight])
    # Forward all that have a target, backward all that have a gradient; tiles are filled up.
    assert counts["logits"] == (fill(asked, 48) + fill(live, 48)) * VOCAB
    assert counts["hidden"] == counts["weight"] == live * VOCAB
    counts.update(logits=0, hidden=0, weight=0)
    values = linear_logprob(
        hidden, weight, targets, 1.0, VOCAB, implementation=name,
        token_gradient=lambda rows, *_: (g[0][rows], g[1][rows]),
    )  # fmt: skip
    gradients(values, tuple(g), [hidden, weight])
    assert counts["logits"] == fill(asked, 32) * VOCAB
    assert counts["hidden"] == counts["weight"] == live * VOCAB


@pytest.mark.parametrize("one_pass", [False, True])
def test_a_frozen_side_costs_nothing(monkeypatch, one_pass):
    hidden, weight, targets, g = problem()
    token_gradient = (lambda rows, *_: (g[0][rows], g[1][rows])) if one_pass else None
    counts = count_products(monkeypatch, "cpu")
    for inputs, none in (
        ((hidden, weight.detach()), "weight"),
        ((hidden.detach(), weight), "hidden"),
    ):
        counts.update(logits=0, hidden=0, weight=0)
        values = linear_logprob(*inputs, targets, 1.0, VOCAB, token_gradient=token_gradient)
        (values[0] * g[0]).sum().backward()
        assert counts[none] == 0
        assert counts["hidden" if none == "weight" else "weight"] > 0
    assert hidden.grad is not None and weight.grad is not None
