"""Optimizer state in pieces between jobs of real ranks."""

import pytest
import torch

SHAPE = (37, 3)


def whole(field):
    return torch.arange(37 * 3, dtype=torch.float32) * (3 if field == "main" else 7)


def piece_of(process):
    """Uneven parts: the last rank has most."""
    from rl_megatron.checkpoint.pieces import Piece

    count = process.layout.world_size
    start = 10 * process.rank
    stop = start + 10 if process.rank < count - 1 else 37 * 3
    fields = ("main", "exp_avg")
    return Piece("w", SHAPE, start, {field: whole(field)[start:stop].clone() for field in fields})


def start_job(count):
    from rl_megatron.parallel.layout import Layout
    from rl_megatron.parallel.process import start_megatron

    return start_megatron(Layout(data=count), seed=0)


def save_job(count, root, background):
    from rl_megatron.checkpoint.pieces import WrittenPieces
    from rl_megatron.checkpoint.publish import NewCheckpoint
    from rl_megatron.checkpoint.saving import save_parts

    process = start_job(count)
    new = NewCheckpoint(root, 1, process)
    part = WrittenPieces(new.aside, process, [piece_of(process)], {})
    save_parts(new.aside, process, [part], background=background).finish()
    new.publish()
    return True


def read_job(count, root):
    """Whether what was read is what this rank would hold."""
    from rl_megatron.checkpoint.pieces import Piece, PieceFiles
    from rl_megatron.checkpoint.publish import iteration_folder

    expected = piece_of(start_job(count))
    tensors = {field: torch.zeros_like(value) for field, value in expected.tensors.items()}
    with PieceFiles(iteration_folder(root, 1)) as files:
        files.fill(Piece("w", SHAPE, expected.start, tensors))
        filled = all(torch.equal(tensors[field], expected.tensors[field]) for field in tensors)
        return filled and torch.equal(files.shard("w", "main", 0).view(-1), whole("main"))


@pytest.mark.parametrize("background", [True, False])
def test_two_ranks_write_and_one_or_three_read(background, pool, tmp_path):
    pool(2).run(save_job, 2, tmp_path / "root", background)
    for count in (1, 3):
        assert pool(count).run(read_job, count, tmp_path / "root") == [True] * count


def full_disk_job(root):
    """What each rank is told where the second one cannot write."""
    import resource

    from rl_megatron.checkpoint.pieces import WrittenPieces
    from rl_megatron.checkpoint.publish import NewCheckpoint
    from rl_megatron.checkpoint.saving import save_parts
    from rl_megatron.errors import CheckpointError

    process = start_job(2)
    new = NewCheckpoint(root, 1, process)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if process.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        part = WrittenPieces(new.aside, process, [piece_of(process)], {})
        save_parts(new.aside, process, [part], background=True).finish()
    except CheckpointError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_rank_that_cannot_write_fails_the_save_on_all(pool, tmp_path):
    for said in pool(2).run(full_disk_job, tmp_path / "root"):
        assert "cannot be written: rank 1: " in said
        assert "File too large" in said
