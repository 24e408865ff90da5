"""DeepSpeed itself, imported on use and told which device there is."""

from __future__ import annotations

import fcntl
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch

from rl_megatron.errors import ConfigError

logger = logging.getLogger(__name__)
# Torch's names of the extensions that it is made of.
_DISK_READER = ("pin_memory", "async_io")


def load_deepspeed() -> ModuleType:
    """The package, ready to use the process group of this job.

    While it is imported it looks for its accelerator, and takes the one that torch was built for
    even where there is none.
    """
    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.setdefault("LOCAL_RANK", "0")  # Of a process without a launcher.
    # Names of torch's collectives that DeepSpeed has not followed yet.
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)
    import deepspeed
    from deepspeed.utils import logger as its_logger

    its_logger.setLevel(logging.WARNING)
    # Collectives of its inference on a CPU, used by nothing here, would be compiled first.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not deepspeed.comm.is_initialized():
        backend = torch.distributed.get_backend()
        deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=False)
    return deepspeed


def load_disk_reader() -> None:
    """What DeepSpeed reads and writes disks with; the first time on a machine it is compiled.

    Raises:
        ConfigError: It cannot be.
    """
    load_deepspeed()
    from deepspeed.ops.op_builder import AsyncIOBuilder
    from torch.utils.cpp_extension import _get_build_directory

    if not AsyncIOBuilder().is_compatible(verbose=False):
        raise ConfigError(
            "deepspeed.offload_optimizer or offload_param = 'nvme': DeepSpeed finds no headers of "
            "libaio to compile its disk reader with; install libaio-dev (libaio-devel on Red Hat) "
            "and a C++ compiler, or offload to cpu"
        )
    _prefer_own_programs()
    folders = [Path(_get_build_directory(name, verbose=False)) for name in _DISK_READER]
    with _one_at_a_time(folders):
        if not (folders[-1] / f"{_DISK_READER[-1]}.so").exists():
            logger.info("compiling DeepSpeed's disk reader, once; this takes minutes")
        AsyncIOBuilder().load(verbose=False)


def _prefer_own_programs() -> None:
    """Find the ninja beside this Python, whose environment need not be active, before another one,
    which would compile everything again."""
    own = str(Path(sys.executable).parent)
    others = [folder for folder in os.environ["PATH"].split(os.pathsep) if folder != own]
    os.environ["PATH"] = os.pathsep.join([own, *others])


@contextmanager
def _one_at_a_time(folders: Sequence[Path]) -> Iterator[None]:
    """Of all processes. Torch's own lock stays for ever where the one that compiled was killed."""
    with (folders[0] / "rl_megatron.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for folder in folders:
            (folder / "lock").unlink(missing_ok=True)
        yield
