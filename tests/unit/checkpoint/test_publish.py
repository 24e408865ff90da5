"""A checkpoint counts only when all of it is durable."""

import threading

import pytest
import torch

from rl_megatron.checkpoint.publish import (
    POINTER_FILE,
    NewCheckpoint,
    durable_file,
    iteration_folder,
    new_checkpoint,
    new_folder,
    read_pointer,
    saved_iterations,
)
from rl_megatron.errors import CheckpointError
from rl_megatron.parallel.layout import Layout
from rl_megatron.parallel.process import Process

ALONE = Process(layout=Layout(), rank=0, device=torch.device("cpu"))


def write(root, iteration, text="whole"):
    with new_checkpoint(root, iteration, ALONE) as folder:
        assert folder.name.endswith(".tmp")
        assert list(folder.iterdir()) == []
        (folder / "weights").write_text(text)


def test_the_pointer_follows_the_latest_checkpoint(tmp_path):
    root = tmp_path / "checkpoints"
    assert read_pointer(tmp_path) is None
    for iteration in (50, 100):
        write(root, iteration)
        assert (root / POINTER_FILE).read_text() == f"{iteration}\n"
        assert read_pointer(root) == iteration
    assert sorted(p.name for p in root.iterdir()) == [
        "iter_0000050",
        "iter_0000100",
        POINTER_FILE,
    ]


def test_a_save_that_dies_changes_nothing_and_its_leftovers_go(tmp_path):
    write(tmp_path, 50)
    with pytest.raises(OSError), new_checkpoint(tmp_path, 100, ALONE) as folder:  # noqa: PT012
        (folder / "half").write_text("half")
        raise OSError("disk full")
    assert read_pointer(tmp_path) == 50
    assert not iteration_folder(tmp_path, 100).exists()

    write(tmp_path, 100)
    assert [p.name for p in iteration_folder(tmp_path, 100).iterdir()] == ["weights"]


def test_a_folder_that_the_pointer_does_not_name_is_replaced(tmp_path):
    """What a job leaves that is killed between the rename and the pointer."""
    write(tmp_path, 50)
    iteration_folder(tmp_path, 100).mkdir()
    (iteration_folder(tmp_path, 100) / "stale").write_text("")
    write(tmp_path, 100)
    assert [p.name for p in iteration_folder(tmp_path, 100).iterdir()] == ["weights"]


def test_the_latest_checkpoint_is_never_written_over(tmp_path):
    write(tmp_path, 50)
    with pytest.raises(CheckpointError, match="iter_0000050 exists already"):
        write(tmp_path, 50, "other")
    assert (iteration_folder(tmp_path, 50) / "weights").read_text() == "whole"


def test_what_a_killed_attempt_still_writes_goes_nowhere(tmp_path):
    """A writer may outlive its rank: its successor writes under another name."""
    killed = NewCheckpoint(tmp_path, 100, ALONE)
    successor = NewCheckpoint(tmp_path, 100, ALONE)
    (successor.aside / "weights").write_text("whole")
    with pytest.raises(FileNotFoundError):
        (killed.aside / "weights").write_text("late")
    successor.publish()
    assert (iteration_folder(tmp_path, 100) / "weights").read_text() == "whole"


def test_two_writers_of_one_file_do_not_meet(tmp_path):
    """Jobs that share a cache, in containers where each is process 7."""
    path = tmp_path / "manifest.json"
    with durable_file(path) as one, durable_file(path) as other:
        one.write_text("one")
        other.write_text("other")
    assert path.read_text() == "one"
    assert list(tmp_path.iterdir()) == [path]


def test_only_the_last_checkpoints_are_kept(tmp_path):
    for iteration in (10, 20, 30):
        new = NewCheckpoint(tmp_path, iteration, ALONE)
        (new.aside / "weights").write_text("whole")
        assert saved_iterations(tmp_path)[-1:] == [iteration - 10][: iteration // 20]
        new.publish(keep_last=2)
    assert saved_iterations(tmp_path) == [20, 30]
    # What lies ahead was left by a run that went on from an earlier one; it is replaced in time.
    iteration_folder(tmp_path, 90).mkdir()
    NewCheckpoint(tmp_path, 40, ALONE).publish(keep_last=1)
    assert saved_iterations(tmp_path) == [40, 90]
    assert read_pointer(tmp_path) == 40
    wait_for_deletions()
    assert not list(tmp_path.glob("*.tmp"))


def test_a_deletion_that_was_cut_short_is_ended_by_the_next(tmp_path):
    left = tmp_path / "iter_0000010.deleted.tmp"
    left.mkdir()
    (left / "weights").write_text("old")
    write(tmp_path, 20)
    NewCheckpoint(tmp_path, 30, ALONE).publish(keep_last=2)
    wait_for_deletions()
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "iter_0000020",
        "iter_0000030",
        POINTER_FILE,
    ]


def wait_for_deletions():
    for thread in threading.enumerate():
        if thread.name == "delete-checkpoints":
            thread.join()


def test_a_folder_is_replaced_only_on_demand(tmp_path):
    for text, replace in (("old", False), ("new", True)):
        with new_folder(tmp_path / "out", ALONE, replace=replace) as folder:
            (folder / text).write_text("")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["new"]
    with (
        pytest.raises(CheckpointError, match="exists already"),
        new_folder(tmp_path / "out", ALONE),
    ):
        pass


@pytest.mark.parametrize(
    ("text", "word"), [("", "''"), ("release", "release"), ("7", "iter_0000007")]
)
def test_a_pointer_to_nothing_is_an_error(text, word, tmp_path):
    (tmp_path / POINTER_FILE).write_text(text)
    with pytest.raises(CheckpointError, match=word) as error:
        read_pointer(tmp_path)
    assert POINTER_FILE in str(error.value)
