"""Attention on the CPU takes memory in proportion to tokens, never to their square."""

import multiprocessing
from pathlib import Path

import pytest
import torch

from rl_megatron.models.sequence import SequenceContext
from rl_megatron.models.span_attention import span_attention
from rl_megatron.models.spans import find_spans, make_blocks

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16


def one_sequence(num_tokens):
    return [num_tokens], [(0, 0, num_tokens)]


def many_sequences(num_tokens):
    return [num_tokens // 2, *[128] * (num_tokens // 256)], [(0, 0, num_tokens)]


def middle_of_a_sequence(num_tokens):
    """What the second of two context-parallel ranks holds, of one sequence."""
    quarter = num_tokens // 4
    return [num_tokens], [(0, quarter, 2 * quarter), (quarter, 2 * quarter, 3 * quarter)]


BATCHES = [one_sequence, many_sequences, middle_of_a_sequence]


def forward_and_backward(lengths, pieces):
    """Bytes that the forward pass keeps for the backward pass; both are run."""
    num_tokens, num_local = sum(lengths), sum(end - start for _, start, end in pieces)
    sizes = ((num_local, HEADS), (num_tokens, KV_HEADS), (num_tokens, KV_HEADS))
    inputs = [torch.randn(n, heads, HEAD_DIM, requires_grad=True) for n, heads in sizes]
    bounds = torch.tensor([0, *lengths]).cumsum(0).tolist()
    blocks, restore = make_blocks(find_spans(bounds, pieces), torch.device("cpu"))
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = span_attention(*inputs, SequenceContext(blocks=blocks, restore=restore), 0.25)
    output.sum().backward()
    return sum(kept.values())


@pytest.mark.parametrize("batch", BATCHES)
def test_twice_the_tokens_keep_twice_the_bytes(batch):
    few, many = (forward_and_backward(*batch(n)) for n in (2048, 4096))
    assert few > 2048 * HEADS * HEAD_DIM
    assert many == pytest.approx(2 * few, rel=0.05)


def peak():
    """Most bytes that this process has held; unlike what getrusage says, not of its parent."""
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in x)
    return 1024 * int(line.split()[1])


def growth_of_the_peak(sizes):
    """Bytes by which a fresh process has grown, size after size, since a short batch."""
    torch.set_num_threads(1)
    for batch in BATCHES:
        forward_and_backward(*batch(512))
    before = peak()
    growths = []
    for num_tokens in sizes:
        for batch in BATCHES:
            forward_and_backward(*batch(num_tokens))
        growths.append(peak() - before)
    return growths


def test_the_peak_grows_with_the_tokens_and_stays_far_below_one_matrix_of_scores():
    sizes = (2048, 4096, 8192)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        few, more, many = pool.apply(growth_of_the_peak, (sizes,))
    # Measured 10, 20 and 40 MiB; with the square the last would be 16 times the first.
    assert 0 < few < more < many < 7 * few
    # Scores of one head.
    assert many < 4 * sizes[-1] ** 2 / 4
