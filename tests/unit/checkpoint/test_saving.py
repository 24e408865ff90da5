"""Parts of a checkpoint are written beside training, and what fails is told to all."""

import resource
import threading

import pytest
import torch

from rl_megatron.checkpoint.pieces import Piece, PieceFiles, WrittenPieces
from rl_megatron.checkpoint.saving import Saving, save_parts
from rl_megatron.errors import CheckpointError
from rl_megatron.interfaces.protocols import PendingSave
from rl_megatron.parallel.layout import Layout
from rl_megatron.parallel.process import Process

ALONE = Process(Layout(), 0, torch.device("cpu"))


def pieces(folder, value):
    piece = Piece("w", tuple(value.shape), 0, {"exp_avg": value})
    return WrittenPieces(folder, ALONE, [piece], {})


class SlowDisk:
    """A part that is written once it may."""

    def __init__(self, part):
        self.part = part
        self.files = part.files
        self.reads_live = part.reads_live
        self.may_write = threading.Event()
        self.finished = []

    def write(self):
        assert self.may_write.wait(20)
        self.part.write()
        return "answer"

    def finish(self, written):
        self.finished.append(written)


def test_the_state_may_change_once_it_has_been_read(tmp_path):
    value = torch.ones(5)
    part = SlowDisk(pieces(tmp_path, value))
    saving = save_parts(tmp_path, ALONE, [part], background=True)
    assert isinstance(saving, PendingSave)

    def update():
        saving.settle()
        value.fill_(2.0)

    updating = threading.Thread(target=update)
    updating.start()
    updating.join(0.2)
    assert updating.is_alive()
    assert not saving.is_done()
    assert part.finished == []

    part.may_write.set()
    updating.join(20)
    saving.finish()
    assert saving.is_done()
    assert part.finished == ["answer"]
    saving.finish()
    assert part.finished == ["answer"]
    assert torch.equal(value, torch.full((5,), 2.0))
    with PieceFiles(tmp_path) as files:
        assert torch.equal(files.shard("w", "exp_avg", 0), torch.ones(5))


@pytest.mark.parametrize("background", [True, False])
def test_a_full_disk_fails_the_save_with_its_reason(background, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (256, hard))
    try:
        with pytest.raises(CheckpointError, match=r"cannot be written: rank 0: .*File too large"):
            save_parts(
                tmp_path, ALONE, [pieces(tmp_path, torch.ones(500))], background=background
            ).finish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_nobody_waits_for_what_is_written_from_a_copy(tmp_path):
    part = SlowDisk(pieces(tmp_path, torch.ones(5)))
    assert part.reads_live
    part.reads_live = False
    saving = save_parts(tmp_path, ALONE, [part], background=True)
    saving.settle()
    assert not saving.is_done()
    part.may_write.set()
    saving.finish()


class Broken:
    files = ()
    reads_live = True

    def write(self):
        raise ValueError("a mistake of ours")


def test_a_mistake_of_ours_holds_nobody_up_and_is_raised(tmp_path):
    saving = Saving(tmp_path, ALONE, [Broken()])
    saving.settle()
    with pytest.raises(ValueError, match="a mistake of ours"):
        saving.finish()
