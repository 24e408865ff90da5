"""What DeepSpeed compiles is compiled by one process at a time, or refused before anything else."""

import fcntl

import pytest

from rl_megatron.backends.deepspeed.package import (
    _one_at_a_time,
    load_deepspeed,
    load_disk_reader,
)
from rl_megatron.errors import ConfigError
from rl_megatron.parallel.process import start_data_parallel


def test_the_lock_that_a_killed_compile_left_is_gone_and_others_wait(tmp_path):
    folders = [tmp_path / name for name in ("one", "other")]
    for folder in folders:
        folder.mkdir()
        (folder / "lock").touch()
    with _one_at_a_time(folders):
        assert not any((folder / "lock").exists() for folder in folders)
        with (tmp_path / "one/rl_megatron.lock").open() as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with (tmp_path / "one/rl_megatron.lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_machine_without_libaio_is_told_what_to_install(monkeypatch):
    start_data_parallel()
    load_deepspeed()  # Which chooses the device that DeepSpeed is imported for.
    monkeypatch.setattr(
        "deepspeed.ops.op_builder.AsyncIOBuilder.is_compatible", lambda self, verbose: False
    )
    with pytest.raises(ConfigError, match=r"nvme.*libaio.*install libaio-dev.*offload to cpu"):
        load_disk_reader()
