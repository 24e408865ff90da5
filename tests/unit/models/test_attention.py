"""Attention over packed sequences and over the cache, against the naive formula in float64."""

import math

import pytest
import torch

from rl_megatron.models.attention import cached_attention, rotate
from rl_megatron.models.sequence import packed_context
from rl_megatron.models.span_attention import span_attention

HEAD_DIM = 8
FREQUENCIES = 1.0 / 100.0 ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
# Around the sizes at which a bucket is closed, in no order; empty sequences too.
LENGTHS = [1, 33, 9, 8, 1, 0, 17, 64, 57, 56, 63, 2, 100, 88, 87, 0, 16]


def naive_attention(query, key, value, scale):
    """Causal attention of one sequence [T, heads, d], head by head, row by row, in float64."""
    query, key, value = query.double(), key.double(), value.double()
    share = query.shape[1] // key.shape[1]
    output = torch.zeros_like(query)
    for head in range(query.shape[1]):
        for row in range(query.shape[0]):
            scores = scale * key[: row + 1, head // share] @ query[row, head]
            output[row, head] = scores.softmax(0) @ value[: row + 1, head // share]
    return output


def make_inputs(num_tokens, heads, kv_heads, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(num_tokens, n, HEAD_DIM, generator=generator).to(dtype)
        for n in (heads, kv_heads, kv_heads)
    ]


def attend(inputs, lengths, scale=0.3):
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    context = packed_context(bounds, FREQUENCIES, torch.device("cpu"))
    return span_attention(*inputs, context, scale)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (6, 1)])
def test_packed_attention_is_causal_within_each_sequence(heads, kv_heads):
    inputs = make_inputs(sum(LENGTHS), heads, kv_heads)
    found = attend(inputs, LENGTHS)
    parts = zip(*(x.split(LENGTHS) for x in inputs), strict=True)
    expected = torch.cat([naive_attention(*part, 0.3) for part in parts])
    assert found.shape == (sum(LENGTHS), heads, HEAD_DIM)
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=1e-5)


def test_gradients_stay_within_each_sequence_and_are_right():
    lengths = [5, 1, 12, 7]
    inputs = [x.double().requires_grad_() for x in make_inputs(sum(lengths), 4, 2)]
    upstream = torch.randn(
        sum(lengths), 4, HEAD_DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    found = torch.autograd.grad((attend(inputs, lengths) * upstream).sum(), inputs)
    parts = zip(*(x.split(lengths) for x in inputs), strict=True)
    naive = torch.cat([_differentiable_attention(*part, 0.3) for part in parts])
    expected = torch.autograd.grad((naive * upstream).sum(), inputs)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-10)
    # Only what is in the second sequence moves with its one output.
    only = torch.autograd.grad(attend(inputs, lengths)[5].sum(), inputs, allow_unused=True)
    for gradient in only:
        assert not gradient[:5].any() and not gradient[6:].any()


def _differentiable_attention(query, key, value, scale):
    share = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(share, dim=1).transpose(0, 1) for x in (key, value))
    scores = scale * query.transpose(0, 1) @ key.transpose(1, 2)
    later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    return (scores.masked_fill(later, -math.inf).softmax(2) @ value).transpose(0, 1)


def test_neighbours_of_its_bucket_change_no_bit_of_a_sequence():
    lengths = [50, 48, 45, 3, 50, 1, 47]
    inputs = make_inputs(sum(lengths), 4, 2)
    together = attend(inputs, lengths)
    for index, part in enumerate(zip(*(x.split(lengths) for x in inputs), strict=True)):
        padded = max(n for n in lengths if lengths[index] >= min(n - 8, n * 7 // 8))
        mine = together.split(lengths)[index]
        # Alone it is computed in a block of its own length: equal, if not always to the bit.
        torch.testing.assert_close(attend(list(part), lengths[index : index + 1]), mine)
        # Beside any other sequences in a block of the same size it is equal to the bit.
        others = make_inputs(padded, 4, 2, seed=index + 10)
        beside = [torch.cat([x, y]) for x, y in zip(part, others, strict=True)]
        found = attend(beside, [lengths[index], padded])[: lengths[index]]
        assert torch.equal(found, mine)


def test_garbage_in_one_sequence_stays_there():
    lengths = [9, 10, 11]
    inputs = make_inputs(30, 2, 2)
    clean = attend(inputs, lengths)
    for x in inputs:
        x[9:19] = math.nan
    found = attend(inputs, lengths)
    assert torch.equal(found[:9], clean[:9])
    assert torch.equal(found[19:], clean[19:])


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2)])
def test_cached_attention_is_the_last_row_of_span_attention(heads, kv_heads):
    lengths = [1, 7, 30, 2]
    parts = [make_inputs(n, heads, kv_heads, seed=n) for n in lengths]
    # What lies behind the new token in the cache is left from another sequence.
    keys, values = torch.full((2, 4, 40, kv_heads, HEAD_DIM), 1e4).unbind(0)
    for row, (_, key, value) in enumerate(parts):
        keys[row, : len(key)], values[row, : len(key)] = key, value
    query = torch.stack([part[0][-1] for part in parts])
    found = cached_attention(query, keys, values, torch.tensor(lengths) - 1, 0.3)
    expected = torch.stack([naive_attention(*part, 0.3)[-1] for part in parts])
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=1e-5)


def test_rotation_turns_halves_together_and_keeps_lengths():
    x = make_inputs(6, 3, 1)[0]
    angles = torch.randn(6, HEAD_DIM // 2, generator=torch.Generator().manual_seed(3))
    both = torch.cat([angles, angles], dim=1)
    found = rotate(x, both.cos(), both.sin())
    # Pairs (i, i + d / 2) as complex numbers.
    half = HEAD_DIM // 2
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(
        torch.ones_like(angles), angles
    ).unsqueeze(1)
    torch.testing.assert_close(found, torch.cat([turned.real, turned.imag], dim=-1))
    torch.testing.assert_close(found.norm(dim=-1), x.norm(dim=-1))
    assert rotate(x.bfloat16(), both.cos(), both.sin()).dtype == torch.bfloat16


def test_scores_after_rotation_depend_on_distances_only():
    query, key, _ = make_inputs(20, 1, 1)
    query[:], key[:] = query[0].clone(), key[0].clone()
    context = packed_context(torch.tensor([0, 20]), FREQUENCIES, torch.device("cpu"))
    q, k = (rotate(x, context.cos, context.sin)[:, 0] for x in (query, key))
    scores = q @ k.t()
    for distance in range(20):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-5, rtol=0)
