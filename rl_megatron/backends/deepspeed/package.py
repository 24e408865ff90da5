"""DeepSpeed itself, imported on use and told which device there is."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import warnings
from pathlib import Path
from types import ModuleType

import torch

from rl_megatron.errors import ConfigError


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
    from deepspeed.utils import logger

    logger.setLevel(logging.WARNING)
    # Collectives of its inference on a CPU, used by nothing here, would be compiled first.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not deepspeed.comm.is_initialized():
        backend = torch.distributed.get_backend()
        deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=False)
    return deepspeed


def require_disk_reader() -> None:
    """Make sure that DeepSpeed can compile what it reads and writes disks with, on first use.

    Raises:
        ConfigError: It cannot.
    """
    load_deepspeed()
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible(verbose=False):
        raise ConfigError(
            "deepspeed.offload_optimizer or offload_param = 'nvme': DeepSpeed finds no headers of "
            "libaio to compile its disk reader with; install libaio-dev (libaio-devel on Red Hat) "
            "and a C++ compiler, or offload to cpu"
        )
    if shutil.which("ninja") is None:
        # It was installed beside Python, in an environment that is not active.
        os.environ["PATH"] += os.pathsep + str(Path(sys.executable).parent)
