"""Logging of a run: what reaches the terminal, and the full log of each rank.

Rank 0 shows INFO of this project and warnings of everyone else; the other ranks show warnings.
Everything from INFO up lands in `<run folder>/logs/attempt_<n>/rank_<r>.log`.
"""

from __future__ import annotations

import functools
import logging
import re
import warnings
from pathlib import Path

from rich.console import Console
from rich.logging import RichHandler

# Loggers whose INFO lines are for the reader of a terminal. A recipe that is run is __main__.
_OURS = ("rl_megatron", "recipes", "tools", "__main__")
_FILE_HANDLER = "rl_megatron.file"
_FILE_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@functools.cache
def console() -> Console:
    """The terminal (standard error). Progress bars draw on the same one, so lines do not mix."""
    return Console(stderr=True)


def setup_logging(rank: int) -> None:
    """Send log lines and Python warnings to the terminal. Called once, first thing, by each rank.

    Args:
        rank: This process among all of the run.
    """
    handler: logging.Handler
    if console().is_terminal and rank == 0:
        handler = RichHandler(console=console(), show_path=False, log_time_format="[%X]")
    else:
        handler = logging.StreamHandler()
        where = f"[rank {rank}] " if rank else ""
        handler.setFormatter(logging.Formatter(f"%(asctime)s {where}%(levelname)s %(message)s"))
    handler.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    handler.addFilter(_for_the_terminal)
    logging.getLogger().setLevel(logging.INFO)
    _install(handler, "rl_megatron.terminal")
    logging.captureWarnings(True)


def log_to_run_folder(run_folder: Path, attempt: int, rank: int) -> Path:
    """The file that from now on takes every line of this rank, INFO and up.

    Args:
        run_folder: The run's output folder.
        attempt: The same number on all ranks; see `next_attempt`.
        rank: This process among all of the run.
    """
    path = run_folder / "logs" / f"attempt_{attempt}" / f"rank_{rank}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter(_FILE_FORMAT))
    _install(handler, _FILE_HANDLER)
    return path


def attempt_folder() -> Path | None:
    """Where the log files of this attempt are; None before `log_to_run_folder`."""
    for handler in logging.getLogger().handlers:
        if handler.name == _FILE_HANDLER and isinstance(handler, logging.FileHandler):
            return Path(handler.baseFilename).parent
    return None


def next_attempt(run_folder: Path) -> int:
    """One more than the attempts that have left logs. Ask on one rank and tell the others."""
    found = (run_folder / "logs").glob("attempt_*")
    matches = (re.fullmatch(r"attempt_(\d+)", path.name) for path in found)
    return max((int(match[1]) for match in matches if match), default=0) + 1


# What Megatron-Core makes torch and Python warn of, whoever calls it and however.
_MEGATRON_WARNINGS = (
    r".*torch\.distributed\.\w+` is deprecated",
    r".*full scope is deprecated",
    r".*\.grad attribute of a Tensor that is not a leaf",
    r".*Apex (is|are) not installed",
    r".*Transformer Engine and Apex are not installed",
)


def silence_megatron_warnings() -> None:
    """Ignore warnings that no user of a recipe can do anything about; before Megatron is imported.

    Those about Apex and Transformer Engine are among them: what a layer is made of is in the run's
    own log.
    """
    for message in _MEGATRON_WARNINGS:
        warnings.filterwarnings("ignore", message=message)


def _install(handler: logging.Handler, name: str) -> None:
    """Put `handler` in the place of the one of that name, if there is one; leave others alone."""
    root = logging.getLogger()
    for old in [handler for handler in root.handlers if handler.name == name]:
        root.removeHandler(old)
        old.close()
    handler.name = name
    root.addHandler(handler)


def _for_the_terminal(record: logging.LogRecord) -> bool:
    ours = record.name.split(".")[0] in _OURS
    return ours or record.levelno >= logging.WARNING
