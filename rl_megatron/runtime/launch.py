"""How a recipe is run: an error is one message and an exit code, and no rank waits for another."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import TypeVar

from rl_megatron import log
from rl_megatron.config.runs import RunBase
from rl_megatron.errors import CheckpointError, ConfigError, DataError, RLMegatronError
from rl_megatron.parallel import process as processes

Run = TypeVar("Run", bound=RunBase)

EXIT_MISTAKE = 2
EXIT_FAILED = 1
# What the user gave was wrong: trying again without a change cannot help.
_MISTAKES = (ConfigError, DataError, CheckpointError)

logger = logging.getLogger(__name__)


def launch(train: Callable[[Run], None], run: Run) -> None:
    """Run the recipe; the process ends here, with 0, or 2 for a mistake in
    settings, data or model folders, or 1.

    A rank that fails leaves at once, without a collective: the others may be waiting in one that
    it will never join, and it is the launcher's part to end them.
    """
    rank = int(os.environ.get("RANK", "0"))
    log.setup_logging(rank)
    log.silence_megatron_warnings()
    try:
        train(run)
    except RLMegatronError as error:
        # Every rank finds the same mistake; one says so, the log files have it of all.
        logger.log(logging.ERROR if rank == 0 else logging.INFO, "%s", error)
        _leave(EXIT_MISTAKE if isinstance(error, _MISTAKES) else EXIT_FAILED)
    except BaseException:
        logger.exception("rank %d failed", rank)
        _leave(EXIT_FAILED)
    processes.stop()


def _leave(code: int) -> None:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
