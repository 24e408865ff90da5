"""Attention on the CPU takes memory in proportion to tokens, never to their square."""

import multiprocessing
import resource

import pytest
import torch

from rl_megatron.models.attention import packed_attention
from rl_megatron.models.sequence import SequenceContext
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
        output = packed_attention(*inputs, SequenceContext(blocks=blocks, restore=restore), 0.25)
    output.sum().backward()
    return sum(kept.values())


@pytest.mark.parametrize("batch", BATCHES)
def test_twice_the_tokens_keep_twice_the_bytes(batch):
    few, many = (forward_and_backward(*batch(n)) for n in (2048, 4096))
    assert few > 2048 * HEADS * HEAD_DIM
    assert many == pytest.approx(2 * few, rel=0.05)


def growth_of_the_peak(num_tokens):
    """Bytes by which a fresh process grows over the warm one that it is after a short batch."""
    torch.set_num_threads(1)
    for batch in BATCHES:
        forward_and_backward(*batch(512))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for batch in BATCHES:
        forward_and_backward(*batch(num_tokens))
    return 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def test_the_peak_grows_with_the_tokens_and_stays_far_below_one_matrix_of_scores():
    few, many = 4096, 16384
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        growths = pool.map(growth_of_the_peak, (few, 2 * few, many), chunksize=1)
    # Measured 19, 42 and 80 MiB; in proportion to the square the last would be 16 times the first.
    assert 0 < growths[0] < growths[1] < growths[2] < 7 * growths[0]
    # Scores of one head.
    assert growths[2] < 4 * many**2 / 8
