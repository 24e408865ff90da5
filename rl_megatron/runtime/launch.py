"""How a recipe is run: an error is one message and an exit code, and no rank waits for another."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TypeVar

from rl_megatron import log
from rl_megatron.config.runs import RunBase
from rl_megatron.errors import CheckpointError, ConfigError, DataError
from rl_megatron.parallel import process as processes
from rl_megatron.runtime.failure import EXIT_FAILED, leave, report
from rl_megatron.runtime.stopping import EXIT_REQUEUE, Requeue

Run = TypeVar("Run", bound=RunBase)

EXIT_MISTAKE = 2
# What the user gave was wrong: trying again without a change cannot help.
_MISTAKES = (ConfigError, DataError, CheckpointError)

logger = logging.getLogger(__name__)


def launch(train: Callable[[Run], None], run: Run) -> None:
    """Run the recipe; the process ends here.

    It ends with 0; 75 where it has saved and wants to be started again; 2 for a mistake in
    settings, data or model folders; or 1.

    A rank that fails leaves at once, without a collective: the others may be waiting in one that
    it will never join, and it is the launcher's part to end them.
    """
    rank = int(os.environ.get("RANK", "0"))
    log.setup_logging(rank)
    log.silence_megatron_warnings()
    try:
        train(run)
    except Requeue as reason:
        if rank == 0:
            logger.info("%s", reason)
        leave(EXIT_REQUEUE)
    except BaseException as error:  # noqa: BLE001 - whatever it is, this rank leaves.
        report(rank, error)
        leave(EXIT_MISTAKE if isinstance(error, _MISTAKES) else EXIT_FAILED)
    processes.stop()
