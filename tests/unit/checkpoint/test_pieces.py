"""Optimizer state in pieces: what one cut of ranks wrote, any other cut reads (real ranks:
tests/distributed/test_pieces.py)."""

import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl_megatron.checkpoint.pieces import Piece, PieceFiles, WrittenPieces
from rl_megatron.checkpoint.saving import save_parts
from rl_megatron.errors import CheckpointError
from rl_megatron.parallel.layout import Layout
from rl_megatron.parallel.process import Process

ALONE = Process(Layout(), 0, torch.device("cpu"))
SHAPES = {"layer.weight": (5, 7), "layer.bias": (7,), "norm": (3,)}
FIELDS = ("main", "exp_avg", "exp_avg_sq")


def state(shard=0):
    """The whole optimizer state of one shard: each element is unlike every other."""
    generator = torch.Generator().manual_seed(shard)
    return {
        name: {field: torch.randn(shape, generator=generator) for field in FIELDS}
        for name, shape in SHAPES.items()
    }


def cut(values, rank, count, shard=0, num_shards=1):
    """This rank's pieces: equal parts of all elements end to end, wherever a parameter begins."""
    whole = sum(tensors["main"].numel() for tensors in values.values())
    first, last = rank * whole // count, (rank + 1) * whole // count
    pieces, offset = [], 0
    for name, tensors in values.items():
        shape, size = tuple(tensors["main"].shape), tensors["main"].numel()
        begin, end = max(first - offset, 0), min(last - offset, size)
        if begin < end:
            parts = {field: tensor.view(-1)[begin:end] for field, tensor in tensors.items()}
            pieces.append(Piece(name, shape, begin, parts, shard, num_shards))
        offset += size
    return pieces


def write(folder, ranks, metadata=None):
    """Write what a job of as many ranks does."""
    for rank, pieces in enumerate(ranks):
        process = Process(Layout(data=len(ranks)), rank, torch.device("cpu"))
        WrittenPieces(folder, process, pieces, metadata or {"step": "12"}).write()


def write_alone(folder, pieces):
    save_parts(folder, ALONE, [WrittenPieces(folder, ALONE, pieces, {})], background=False)


def blank(pieces):
    """The same pieces with nothing in them yet."""
    return [
        Piece(
            piece.name,
            piece.shape,
            piece.start,
            {field: torch.full_like(value, -9.0) for field, value in piece.tensors.items()},
            piece.shard,
            piece.num_shards,
        )
        for piece in pieces
    ]


@pytest.fixture
def written(tmp_path):
    write(tmp_path, [cut(state(), rank, 3) for rank in range(3)])
    return tmp_path


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_another_number_of_ranks_reads_the_same_bits(count, written):
    with PieceFiles(written) as files:
        assert files.metadata == {"step": "12"}
        for rank in range(count):
            expected = cut(state(), rank, count)
            for piece, right in zip(blank(expected), expected, strict=True):
                files.fill(piece)
                for field, value in right.tensors.items():
                    assert torch.equal(piece.tensors[field], value), (piece.name, field)


def test_a_whole_shard_is_put_together(tmp_path):
    """Two tensor-parallel shards, each over two ranks."""
    write(tmp_path, [cut(state(rank // 2), rank % 2, 2, rank // 2, 2) for rank in range(4)])
    with PieceFiles(tmp_path) as files:
        for name in SHAPES:
            assert files.num_shards(name) == 2
            for shard in range(2):
                for field in FIELDS:
                    assert torch.equal(files.shard(name, field, shard), state(shard)[name][field])


def test_every_file_is_a_safetensors_file(written):
    files = sorted(written.iterdir())
    assert [path.name for path in files] == [
        f"optimizer-0000{rank}-of-00003.safetensors" for rank in range(3)
    ]
    first = load_file(files[0])["layer.weight/exp_avg/0/0"]
    assert torch.equal(first, state()["layer.weight"]["exp_avg"].view(-1)[: len(first)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_moments_keep_their_bits(dtype, tmp_path):
    value = torch.randn(9).to(dtype)
    write_alone(tmp_path, [Piece("w", (9,), 0, {"exp_avg": value})])
    with PieceFiles(tmp_path) as files:
        read = files.shard("w", "exp_avg", 0)
    assert read.dtype == dtype
    assert torch.equal(read, value)


def test_a_missing_file_is_named(written):
    (written / "optimizer-00001-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks optimizer-00001-of-00003\.safetensors"):
        PieceFiles(written)


def test_a_folder_without_state_says_so(tmp_path):
    with pytest.raises(CheckpointError, match="holds no optimizer state"):
        PieceFiles(tmp_path)


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-5])


def other_file(path):
    save_file({"w": torch.ones(2)}, path)


@pytest.mark.parametrize("harm", [cut_short, other_file])
def test_a_broken_file_is_named(harm, written):
    harm(written / "optimizer-00002-of-00003.safetensors")
    with pytest.raises(CheckpointError, match=r"00002-of-00003\.safetensors is not a complete"):
        PieceFiles(written)


def test_files_of_two_saves_are_not_mixed(written, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    write(other, [cut(state(), rank, 3) for rank in range(3)], {"step": "13"})
    name = "optimizer-00001-of-00003.safetensors"
    shutil.copy(other / name, written / name)
    with pytest.raises(CheckpointError, match="mixes files of several saves"):
        PieceFiles(written)
    write(written, [cut(state(), 0, 1)])
    with pytest.raises(CheckpointError, match=r"of \[1, 3\] ranks"):
        PieceFiles(written)


def test_a_parameter_that_was_not_saved_is_named(written):
    piece = Piece("layer.new", (2,), 0, {"main": torch.zeros(2)})
    with PieceFiles(written) as files, pytest.raises(CheckpointError, match=r"of layer\.new"):
        files.fill(piece)


def test_a_field_that_was_not_saved_is_named(written):
    piece = Piece("norm", (3,), 0, {"momentum": torch.zeros(3)})
    with PieceFiles(written) as files, pytest.raises(CheckpointError, match="momentum of norm"):
        files.fill(piece)


@pytest.mark.parametrize(("shape", "num_shards"), [((7, 5), 1), ((5, 7), 2)])
def test_another_shape_is_refused(shape, num_shards, written):
    piece = Piece("layer.weight", shape, 0, {"main": torch.zeros(35)}, 0, num_shards)
    said = re.escape(f"as 1 shards of [5, 7], the model has {num_shards} of {list(shape)}")
    with PieceFiles(written) as files, pytest.raises(CheckpointError, match=said):
        files.fill(piece)


def test_a_range_that_no_rank_wrote_is_named(tmp_path):
    pieces = [cut(state(), rank, 3) for rank in range(3)]
    write(tmp_path, [pieces[0], [], pieces[2]])
    with PieceFiles(tmp_path) as files:
        gap = pieces[1][0].start
        with pytest.raises(CheckpointError, match=f"wrote element {gap} of main of layer.weight"):
            files.fill(blank(cut(state(), 0, 1))[0])
        with pytest.raises(CheckpointError, match=f"wrote element {gap} of main of layer.weight"):
            files.shard("layer.weight", "main", 0)
