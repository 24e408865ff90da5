"""What is offloaded to a disk lies alone there, and does not stay for ever."""

import subprocess
import sys

import pytest

from rl_megatron.backends.deepspeed.scratch import Scratch
from rl_megatron.errors import ConfigError
from tests.helpers.pool import ROOT

USES = """
import os, sys
from pathlib import Path
from rl_megatron.backends.deepspeed.scratch import Scratch
scratch = Scratch(Path(sys.argv[1]))
(scratch.folder / "weights").write_text("x")
"""
DIES = "os._exit(9)"


def run(root, script):
    command = [sys.executable, "-c", script, str(root)]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def test_every_model_has_a_folder_of_its_own_until_it_is_closed(tmp_path):
    first, second = Scratch(tmp_path / "disk"), Scratch(tmp_path / "disk")
    (first.folder / "weights").write_text("first")
    (second.folder / "weights").write_text("second")
    assert (first.folder / "weights").read_text() == "first"
    first.close()
    assert list((tmp_path / "disk").iterdir()) == [second.folder]
    second.close()
    assert not second.folder.exists()


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path):
    (tmp_path / "of somebody else").mkdir()
    assert run(tmp_path, USES + DIES) == 9
    assert len(list(tmp_path.glob("*/weights"))) == 1
    scratch = Scratch(tmp_path)
    assert set(tmp_path.iterdir()) == {tmp_path / "of somebody else", scratch.folder}
    scratch.close()


def test_a_process_that_ends_leaves_nothing(tmp_path):
    assert run(tmp_path, USES) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_is_refused_by_name(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"deepspeed\.nvme_path = .*file.*name a folder"):
        Scratch(tmp_path / "file")
