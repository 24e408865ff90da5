"""Starts the ranks of one task of a job, passes signals on, and ends as they ended.

    python tools/launch_node.py --world-size 16 --first-rank 8 --num-ranks 8 SCRIPT [word ...]

slurm/node.sh calls it, once per node or once per GPU. Each rank is `python SCRIPT word ...` with
RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE set; MASTER_ADDR and MASTER_PORT are there
already. SIGUSR1, SIGUSR2 and SIGTERM go to every rank. It exits with 0 if all ranks did, with 75 if
a rank asks for a requeue and none failed, else with the code of the rank that failed first (128 +
the signal that killed it). The last lines of each rank that fails, its traceback among them, are
left in the folder RL_STATE_FOLDER for the job to show last.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

REQUEUE = 75
"""A rank ends with it when it has saved and wants to be started again."""

MISTAKE = 2
"""A rank ends with it after a mistake of the user, which all ranks find and rank 0 explains."""

# Ranks that lose a peer get this long to say so themselves.
_GRACE_SECONDS = 5.0
_EARLIER_NS = 10 * 10**9
_KEPT_LINES = 200
_SHOWN_WITHOUT_TRACEBACK = 20
_TRACEBACK = b"Traceback (most recent call last)"


class _Rank:
    """A process, the end of what it has said, and how it ended."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self.number = int(environment["RANK"])
        self.code: int | None = None
        self.failed_at = 0
        self.is_silent = False
        self._tail: deque[bytes] = deque(maxlen=_KEPT_LINES)
        self._traceback_at = 0
        self.process = subprocess.Popen(
            command, env=environment, stderr=subprocess.PIPE, preexec_fn=_ignore_until_handled
        )
        self._reader = threading.Thread(target=self._pass_lines_on, daemon=True)

    def start_reading(self) -> None:
        """Pass on what the rank says from now on."""
        self._reader.start()

    def end(self, status: int) -> None:
        """Take note of its end; `status` as from waitpid."""
        now, code = time.time_ns(), os.waitstatus_to_exitcode(status)
        self.process.returncode = code
        self.code = 128 - code if code < 0 else code
        # The pipe stays open as long as a child of the rank lives.
        self._reader.join(_GRACE_SECONDS)
        # The others lose their connections before a process is gone, and may be gone sooner. So
        # what counts is when it said what was wrong; one without a traceback fails of what another
        # has said. A kill comes before all that follows from it.
        says_it_for_all = self.code == MISTAKE and self.number == 0
        was_killed = self.code > 128 and self.code != 128 + signal.SIGTERM
        self.is_silent = not (self._traceback_at or says_it_for_all or was_killed)
        self.failed_at = self._traceback_at or now + _EARLIER_NS
        if was_killed or says_it_for_all:
            self.failed_at = now - _EARLIER_NS

    def leave_failure(self) -> None:
        """Write what the job shows last; the names sort by the time of the failure."""
        folder = os.environ.get("RL_STATE_FOLDER")
        if folder is None:
            return
        assert self.code is not None
        how = f"ended with exit code {self.code}"
        if self.code > 128:
            how = f"was killed by {signal.Signals(self.code - 128).name}"
            if self.code == 128 + signal.SIGKILL:
                how += "; when nobody did so, the node had no memory left"
        lines = [line.decode(errors="replace").rstrip("\n") for line in self._tail]
        tracebacks = [n for n, line in enumerate(lines) if line.startswith(_TRACEBACK.decode())]
        first = tracebacks[0] if tracebacks else max(0, len(lines) - _SHOWN_WITHOUT_TRACEBACK)
        said = f"rank {self.number} on {socket.gethostname()} {how}"
        path = Path(folder) / f"failure_{self.failed_at}_rank_{self.number}_code_{self.code}"
        new = path.with_name("." + path.name)
        new.write_text("\n".join([*lines[first:], said]) + "\n", encoding="utf-8")
        new.replace(path)

    def _pass_lines_on(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if line.startswith(_TRACEBACK):
                self._traceback_at = time.time_ns()
            self._tail.append(line)
            sys.stderr.buffer.write(line)
            sys.stderr.buffer.flush()


class Ranks:
    """The processes of this task.

    Args:
        command: What each rank runs.
        environments: One set of environment variables per rank.
        restartable: The ranks put up no handlers and may be ended at any time: a signal does, and
            the launcher then asks for a requeue.
    """

    def __init__(
        self,
        command: Sequence[str],
        environments: Sequence[dict[str, str]],
        restartable: bool = False,
    ) -> None:
        self._restartable = restartable
        self._stopped = False
        self._ended_by_us = False
        self._failed: list[_Rank] = []
        self._ranks: dict[int, _Rank] = {}
        for signum in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
            signal.signal(signum, self._on_signal)
        for environment in environments:
            rank = _Rank(command, environment)
            self._ranks[rank.process.pid] = rank
        for rank in self._ranks.values():
            rank.start_reading()

    def wait(self) -> int:
        """The exit code of the task, when all ranks have ended."""
        while self._living():
            pid, status = os.waitpid(-1, 0)
            if pid in self._ranks:
                self._ranks[pid].end(status)
                self._after(self._ranks[pid])
        if self._stopped:
            return REQUEUE
        if self._failed:
            if all(rank.is_silent for rank in self._failed):
                # When this task ends, Slurm ends the one that has something to say.
                time.sleep(_GRACE_SECONDS)
            return min(self._failed, key=lambda rank: rank.failed_at).code or 0
        return max(rank.code or 0 for rank in self._ranks.values())

    def _living(self) -> list[_Rank]:
        return [rank for rank in list(self._ranks.values()) if rank.code is None]

    def _after(self, rank: _Rank) -> None:
        if rank.code in (0, REQUEUE) or self._ended_by_us:
            return
        self._failed.append(rank)
        rank.leave_failure()
        timer = threading.Timer(_GRACE_SECONDS, self._end)
        timer.daemon = True
        timer.start()

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self._stopped = self._restartable
        # Where a rank of another task failed, Slurm ends the step and ours would wait in vain.
        if self._restartable or (signum == signal.SIGTERM and _any_failure()):
            self._end()
        else:
            self._send(signum)

    def _end(self) -> None:
        self._ended_by_us = True
        self._send(signal.SIGKILL)

    def _send(self, signum: int) -> None:
        for rank in self._living():
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.process.pid, signum)


def _ignore_until_handled() -> None:
    """In a rank before it starts: what asks it to save must not kill it while it imports.

    SIGTERM keeps its meaning: what is ignored stays so in children, and multiprocessing ends its
    own with it.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


def _any_failure() -> bool:
    """Whether a rank of any task has left a failure."""
    folder = os.environ.get("RL_STATE_FOLDER")
    return folder is not None and any(Path(folder).glob("failure_*"))


def port_problem(address: str, port: int) -> str | None:
    """Why rank 0 cannot listen on the port, or None if it can."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            # Not listened to: a rank that starts earlier would take this for rank 0.
            server.bind(("", port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                return f"MASTER_PORT = {port} on {address}: {error.strerror}; set another one"
            return (
                f"MASTER_PORT = {port} on {address} is taken by another process; wait for it to "
                "end, or set MASTER_PORT to a port that is free there"
            )
    return None


def _rank_environments(options: argparse.Namespace) -> list[dict[str, str]]:
    return [
        os.environ
        | {
            "RANK": str(options.first_rank + number),
            "WORLD_SIZE": str(options.world_size),
            "LOCAL_RANK": str(options.first_local_rank + number),
            "LOCAL_WORLD_SIZE": str(options.ranks_per_node or options.num_ranks),
        }
        for number in range(options.num_ranks)
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world-size", type=int, required=True, help="ranks of the job")
    parser.add_argument("--num-ranks", type=int, required=True, help="ranks of this task")
    parser.add_argument("--first-rank", type=int, default=0, help="the lowest of them")
    parser.add_argument("--first-local-rank", type=int, default=0, help="its number on the node")
    parser.add_argument("--ranks-per-node", type=int, help="default: those of this task")
    parser.add_argument(
        "--restartable",
        action="store_true",
        help="a signal ends the ranks at once, and the task asks for a requeue",
    )
    parser.add_argument("script", help="what each rank runs, by this Python")
    parser.add_argument("words", nargs=argparse.REMAINDER)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code of the task."""
    options = _parser().parse_args(arguments)
    if options.first_rank == 0 and options.world_size > 1:
        address = os.environ.get("MASTER_ADDR", "127.0.0.1")
        problem = port_problem(address, int(os.environ.get("MASTER_PORT", "29500")))
        if problem is not None:
            print(f"launch_node: {problem}", file=sys.stderr)
            return 1
    command = [sys.executable, "-u", options.script, *options.words]
    code = Ranks(command, _rank_environments(options), options.restartable).wait()
    if code == REQUEUE and "RL_STATE_FOLDER" in os.environ:
        (Path(os.environ["RL_STATE_FOLDER"]) / "requeue").touch()
    return code


if __name__ == "__main__":
    sys.exit(main())
