"""A few worker processes that compare answers with math-verify, each question under a deadline.

math-verify bounds its time with signal.alarm, which works on a main thread only, and cannot end
some inputs at all (9^9^9^9 is one multiplication to the interpreter). A process can always be
ended. Workers start when first needed and end with the parent.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import wait
from pathlib import Path

from rl_megatron.errors import RolloutError

_LOG = logging.getLogger(__name__)
_PROGRAM = Path(__file__).with_name("math_worker.py")
_START_SECONDS = 120.0
# What Slurm sends asks a run to save, and goes to all processes of its ranks.
_NOT_FOR_WORKERS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)


class _Worker:
    """One process that answers one question at a time."""

    def __init__(self) -> None:
        # A worker lost to a signal would count an answer as wrong. It starts with what is blocked
        # here, and it is always ended by a kill.
        unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_FOR_WORKERS)
        try:
            # -P: the modules beside the program must not shadow others of their names.
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(_PROGRAM)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        if self._reply(_START_SECONDS) != b"ready\n":
            self.close()
            raise RolloutError(
                "rewards.math_answer: the worker process that runs math-verify did not start "
                f"(exit code {self._process.returncode}); try "
                f"`{sys.executable} -c 'import math_verify'` and install math-verify if it fails"
            )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, gold: str, answer: str, cpu_seconds: float) -> bool | None:
        """The verdict, or None if the worker was lost over the question."""
        question = json.dumps([gold, answer, cpu_seconds]) + "\n"
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(question.encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        # The worker's own limit counts CPU time; this one is for a worker that gets none.
        reply = self._reply(10 * cpu_seconds + 10)
        return reply == b"1\n" if reply else None

    def _reply(self, seconds: float) -> bytes:
        """The next line, empty if the worker ended or the time is over."""
        stdout = self._process.stdout
        assert stdout is not None
        return stdout.readline() if wait([stdout.fileno()], seconds) else b""

    def close(self) -> None:
        """End the process at once."""
        self._process.kill()
        with self._process:  # closes the pipes and waits
            pass


class MathPool:
    """Workers by need, at most `num_workers`; may be used from any thread."""

    def __init__(self, num_workers: int) -> None:
        self._executor = ThreadPoolExecutor(num_workers, thread_name_prefix="math-reward")
        self._idle: list[_Worker] = []
        self._lock = threading.Lock()

    def equal(self, pairs: Sequence[tuple[str, str]], cpu_seconds: float) -> list[bool]:
        """Whether gold and answer of each pair are equal; False if that takes too long."""

        def ask(pair: tuple[str, str]) -> bool:
            return self._ask(*pair, cpu_seconds)

        return list(self._executor.map(ask, pairs))

    def _ask(self, gold: str, answer: str, cpu_seconds: float) -> bool:
        with self._lock:
            worker = self._idle.pop() if self._idle else None
        if worker is None or not worker.alive:
            worker = _Worker()
        verdict = worker.ask(gold, answer, cpu_seconds)
        if verdict is None:
            worker.close()
            _LOG.warning(
                "rewards.math_answer: no verdict on %.60r against %.60r within %g s of CPU time; "
                "it counts as not equal",
                answer,
                gold,
                cpu_seconds,
            )
            return False
        with self._lock:
            self._idle.append(worker)
        return verdict

    def close(self) -> None:
        """End every worker; open questions are dropped."""
        self._executor.shutdown(wait=True, cancel_futures=True)
        while self._idle:
            self._idle.pop().close()


_pool: MathPool | None = None
_pool_lock = threading.Lock()


def shared_pool() -> MathPool:
    """The pool of this process, made at the first call and closed at exit.

    It takes this rank's share of the node's cores, 8 at most.
    """
    global _pool
    with _pool_lock:
        if _pool is None:
            ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            _pool = MathPool(min(8, max(1, (os.cpu_count() or 1) // ranks)))
            atexit.register(_pool.close)
        return _pool


def _forget_pool() -> None:
    """In a forked child: the workers and threads are the parent's."""
    global _pool, _pool_lock
    _pool, _pool_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_pool)
