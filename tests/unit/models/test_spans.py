"""Which queries see which keys: whole sequences in blocks, and the parts that a rank holds."""

import random

import pytest
import torch

from rl_megatron.models import span_attention as span_attention_module
from rl_megatron.models.sequence import SequenceContext, packed_context
from rl_megatron.models.span_attention import span_attention
from rl_megatron.models.spans import as_variable_length, find_spans, make_blocks

CPU = torch.device("cpu")
SEVERAL = {
    "equal": [7] * 5,
    "one": [1],
    "empty-ones": [0, 3, 0, 5, 0],
    "nothing": [0, 0],
    "steps": list(range(1, 70)),
    "far-apart": [1, 1000, 10, 100, 2, 999],
    "random": [random.Random(0).randint(1, 300) for _ in range(100)],
}


def blocks_of(lengths):
    """The blocks of whole sequences."""
    bounds = torch.tensor([0, *lengths]).cumsum(0).tolist()
    return make_blocks(find_spans(bounds, [(0, 0, bounds[-1])]), CPU)


@pytest.mark.parametrize("name", [name for name in SEVERAL if name != "nothing"])
def test_blocks_hold_every_token_once_in_order(name):
    lengths = SEVERAL[name]
    blocks, restore = blocks_of(lengths)
    total = sum(lengths)
    laid_out = torch.cat([block.query[block.real] for block in blocks])
    assert sorted(laid_out.tolist()) == list(range(total))
    assert torch.equal(laid_out[restore], torch.arange(total))
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    spans = {tuple(range(a, b)) for a, b in zip(starts, starts[1:], strict=False) if b > a}
    rows = [
        tuple(gather[real].tolist())
        for block in blocks
        for gather, real in zip(block.query, block.real, strict=True)
    ]
    assert len(rows) == len(spans) and set(rows) == spans
    for block in blocks:
        # Padding stands behind what is real, where causal attention does not look.
        assert not (~block.real[:, :-1] & block.real[:, 1:]).any()
        assert block.real[:, 0].all()


@pytest.mark.parametrize("name", [name for name in SEVERAL if name != "nothing"])
def test_padding_is_at_most_an_eighth_or_eight_tokens_a_sequence(name):
    for block in blocks_of(SEVERAL[name])[0]:
        longest = block.real.shape[1]
        assert (longest - block.real.sum(1)).max() <= max(8, longest / 8 + 1)


def test_a_new_block_is_made_where_the_next_sequence_is_too_short():
    def shapes(lengths):
        return [tuple(block.real.shape) for block in blocks_of(lengths)[0]]

    assert shapes([20, 12]) == [(2, 20)]
    assert shapes([20, 11]) == [(1, 20), (1, 11)]
    assert shapes([800, 700]) == [(2, 800)]
    assert shapes([800, 699]) == [(1, 800), (1, 699)]


def test_a_block_of_whole_sequences_has_its_keys_where_its_queries_are():
    for block in blocks_of([20, 12, 1])[0]:
        assert block.offset == 0 and block.mask() is None
        assert torch.equal(block.query, block.key)


def test_queries_from_the_middle_see_the_keys_before_them():
    # Sequences [0, 5) and [5, 9); the rank holds [0, 2) and [6, 8).
    spans = find_spans([0, 5, 9], [(0, 0, 2), (2, 6, 8)])
    assert [(s.query, s.key, s.size, s.offset) for s in spans] == [(0, 0, 2, 0), (2, 5, 2, 1)]
    late = make_blocks(spans, CPU)[0][1]
    assert late.key.tolist() == [[5, 6, 7]]
    assert late.mask().tolist() == [[True, True, False], [True, True, True]]


def test_a_long_run_of_queries_is_cut_so_that_masks_stay_small():
    spans = find_spans([0, 4096], [(0, 1024, 3072)])
    assert {span.size for span in spans} == {512}
    blocks, _ = make_blocks(spans, CPU)
    assert max(block.mask().numel() for block in blocks) == 512 * 3072


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("lengths", [[64], [5, 11, 1, 30, 17], [1] * 32, [3, 61]])
def test_the_ranks_of_a_context_group_together_compute_the_whole(lengths, size):
    generator = torch.Generator().manual_seed(0)
    total = sum(lengths)
    query, key, value = (torch.randn(total, n, 8, generator=generator) for n in (4, 2, 2))
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    whole = span_attention(query, key, value, packed_context(bounds, torch.ones(4), CPU), 0.3)
    chunks = torch.arange(total).view(2 * size, -1)
    for rank in range(size):
        local = torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])
        half = len(local) // 2
        pieces = [(0, int(local[0]), int(local[0]) + half)]
        pieces.append((half, int(local[half]), int(local[half]) + half))
        blocks, restore = make_blocks(find_spans(bounds.tolist(), pieces), CPU)
        context = SequenceContext(blocks=blocks, restore=restore)
        part = span_attention(query[local], key, value, context, 0.3)
        torch.testing.assert_close(part, whole[local], atol=1e-6, rtol=1e-5)


def plain_variable_length(q, k, v, cu_q, cu_k, max_q, max_k, *, scale, window_size, enable_gqa):
    """What torch's kernel is documented to do, span by span: the causal mask ends with the keys."""
    assert window_size == (-1, 0) and enable_gqa
    parts = []
    for i in range(len(cu_q) - 1):
        rows = q[cu_q[i] : cu_q[i + 1]].double()
        keys, values = (
            x[cu_k[i] : cu_k[i + 1]].double().repeat_interleave(q.shape[1] // x.shape[1], 1)
            for x in (k, v)
        )
        assert len(rows) <= max_q and len(keys) <= max_k
        scores = scale * torch.einsum("qhd,khd->hqk", rows, keys)
        seen = torch.ones(len(rows), len(keys), dtype=torch.bool).tril(len(keys) - len(rows))
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        parts.append(torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype))
    return torch.cat(parts)


@pytest.mark.parametrize("pieces", [[(0, 0, 64)], [(0, 16, 32), (16, 48, 64)]])
@pytest.mark.parametrize("lengths", [[64], [5, 11, 1, 30, 17], [1] * 64])
def test_the_kernel_of_a_gpu_is_given_the_same_spans(lengths, pieces, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(64, n, 8, generator=generator).bfloat16() for n in (4, 2, 2))
    local = torch.cat([torch.arange(first, last) for _, first, last in pieces])
    bounds = torch.tensor([0, *lengths]).cumsum(0).tolist()
    spans = find_spans(bounds, pieces)
    blocks, restore = make_blocks(spans, CPU)
    context = SequenceContext(blocks=blocks, restore=restore)
    expected = span_attention(query[local], key, value, context, 0.3)
    monkeypatch.setattr(span_attention_module, "varlen_attn", plain_variable_length)
    context.variable_length = as_variable_length(spans, CPU)
    found = span_attention(query[local], key, value, context, 0.3)
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)
