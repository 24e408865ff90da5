"""How a rank leaves that cannot go on: at once, and so that the first one to fail is heard last.

A rank that fails takes no part in a collective any more, and the others fail in theirs: what they
say is not the cause. So each rank writes why it leaves into the folder of the attempt, and rank 0
repeats what the first of them wrote.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from rl_megatron import log
from rl_megatron.config.runs import RunBase
from rl_megatron.errors import RLMegatronError

EXIT_FAILED = 1

logger = logging.getLogger(__name__)


def leave(code: int) -> NoReturn:
    """End the process without a collective: the others may wait in one it will never join."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def report(rank: int, error: BaseException) -> None:
    """Say why this rank fails, or which one failed before it. No rank waits for another.

    Args:
        rank: This rank.
        error: What was raised. Of an error of ours the message is enough.
    """
    is_ours = isinstance(error, RLMegatronError)
    text = str(error) if is_ours else "".join(traceback.format_exception(error))
    first = _first_failure(rank)
    _write(rank, text)
    if is_ours:
        # Every rank finds the same mistake; one says so, the log files have it of all.
        logger.log(logging.ERROR if rank == 0 else logging.INFO, "%s", error)
    elif first is None:
        logger.error("rank %d failed", rank, exc_info=error)
    else:
        logger.info("rank %d failed", rank, exc_info=error)
        if rank == 0:
            other, other_text = first
            logger.error("rank %d failed, and so the job ends:\n%s", other, other_text.rstrip())


def leave_hanging(run: RunBase, rank: int, still_seconds: float) -> NoReturn:
    """End the process from the watchdog's thread, saying where its other threads stand."""
    said = (
        f"rank {rank} has not come further for {still_seconds:.0f} s, more than "
        f"cluster.timeout_minutes = {run.cluster.timeout_minutes:g}: it ends here. Where it stands:"
    )
    _write(rank, said)
    logger.error("%s", said)
    faulthandler.dump_traceback(all_threads=True)
    leave(EXIT_FAILED)


def _first_failure(rank: int) -> tuple[int, str] | None:
    """The other rank of this attempt that failed first, and why."""
    folder = log.attempt_folder()
    if folder is None:
        return None
    found = [path for path in folder.glob("failure_rank_*.txt") if path != _file(folder, rank)]
    if not found:
        return None
    first = min(found, key=lambda path: path.stat().st_mtime_ns)
    return int(first.stem.rpartition("_")[2]), first.read_text(encoding="utf-8")


def _write(rank: int, text: str) -> None:
    folder = log.attempt_folder()
    if folder is None:
        return
    try:
        _file(folder, rank).write_text(f"{text.rstrip()}\n", encoding="utf-8")
    except OSError as error:
        logger.info("no file says why rank %d leaves: %s", rank, error)


def _file(folder: Path, rank: int) -> Path:
    return folder / f"failure_rank_{rank}.txt"
