"""Split rules: hand-made rows, and bit-equal round trips."""

import pytest
import torch

from rl_megatron.models.split import (
    GateUp,
    Qkv,
    Replicated,
    Sliced,
    Vocab,
    padded_vocab_size,
)


def reader(*tensors):
    return lambda index, slices: tensors[index][slices]


def shards(split, tensors, tp_size):
    return [split.shard(reader(*tensors), rank, tp_size) for rank in range(tp_size)]


def tagged(tags, head_dim, bias):
    """Rows filled with their tag; with head_dim 2 the second row of a head is its tag + 0.5."""
    rows = torch.tensor([tag + row / head_dim for tag in tags for row in range(head_dim)])
    return rows if bias else rows[:, None].repeat(1, 3)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("head_dim", [1, 2])
def test_ck_01_qkv_is_fused_group_by_group(head_dim, bias):
    split = Qkv(4, 2, head_dim, () if bias else (3,))
    hf = [tagged(tags, head_dim, bias) for tags in ([10, 11, 12, 13], [20, 21], [30, 31])]
    assert split.hf_shapes == tuple(tuple(tensor.shape) for tensor in hf)

    (whole,) = shards(split, hf, 1)
    assert whole.equal(tagged([10, 11, 20, 30, 12, 13, 21, 31], head_dim, bias))
    first, second = shards(split, hf, 2)
    assert first.equal(tagged([10, 11, 20, 30], head_dim, bias))
    assert second.equal(tagged([12, 13, 21, 31], head_dim, bias))
    for tp_size in (1, 2):
        joined = split.join(shards(split, hf, tp_size))
        assert all(a.equal(b) for a, b in zip(joined, hf, strict=True))


def test_gate_and_up_halves_are_not_cut_across_ranks():
    gate, up = torch.arange(4.0)[:, None] + 100, torch.arange(4.0)[:, None] + 200
    split = GateUp(4, 1)
    first, second = shards(split, (gate, up), 2)
    assert first.flatten().tolist() == [100, 101, 200, 201]
    assert second.flatten().tolist() == [102, 103, 202, 203]
    assert all(a.equal(b) for a, b in zip(split.join([first, second]), (gate, up), strict=True))


@pytest.mark.parametrize(
    ("dim", "expected"), [(0, [[0, 1, 2, 3], [4, 5, 6, 7]]), (1, [[0, 1, 4, 5], [2, 3, 6, 7]])]
)
def test_column_and_row_parts(dim, expected):
    whole = torch.arange(8.0).reshape(2, 4)
    split = Sliced((2, 4), dim)
    parts = shards(split, (whole,), 2)
    assert [part.flatten().tolist() for part in parts] == expected
    assert split.join(parts)[0].equal(whole)


def test_replicated_is_whole_on_every_rank():
    split = Replicated((3,))
    parts = shards(split, (torch.arange(3.0),), 2)
    assert all(part.tolist() == [0, 1, 2] for part in parts)
    assert split.join(parts)[0].tolist() == [0, 1, 2]


@pytest.mark.parametrize(("tp_size", "padded"), [(1, 1152), (2, 1280), (4, 1536), (8, 2048)])
def test_ck_03_vocabulary_is_padded_in_and_cut_out(tp_size, padded):
    assert padded_vocab_size(1100, 128, tp_size) == padded
    table = torch.randn(1100, 2, generator=torch.Generator().manual_seed(0))
    split = Vocab(1100, 2, 128)
    parts = shards(split, (table,), tp_size)
    assert {part.shape for part in parts} == {(padded // tp_size, 2)}
    assert torch.cat(parts)[:1100].equal(table)
    assert not torch.cat(parts)[1100:].any()
    assert split.join(parts)[0].equal(table)


def test_vocabulary_smaller_than_a_ranks_part_leaves_empty_ranks_zero():
    table = torch.ones(100, 2)
    parts = shards(Vocab(100, 2, 128), (table,), 4)
    assert [int(part.sum()) for part in parts] == [200, 0, 0, 0]


def test_only_the_needed_slices_are_read():
    asked = []

    def read(index, slices):
        asked.append((index, slices))
        return torch.zeros(8, 4)[slices]

    GateUp(8, 4).shard(read, 1, 2)
    Sliced((8, 4), 1).shard(read, 1, 2)
    assert asked == [
        (0, (slice(4, 8),)),
        (1, (slice(4, 8),)),
        (0, (slice(None), slice(2, 4))),
    ]
