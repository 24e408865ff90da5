"""Long-lived pools of gloo processes: importing Megatron costs seconds, so tests share them.

A job is a module-level function of a test file; every rank runs it with the same arguments and
the test gets the list of what the ranks returned. Failing ranks show their tracebacks.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def _load(path: str) -> Any:
    """The module of a test file, under a name that pickling and re-import agree on."""
    name = "pool_job_" + Path(path).stem
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def _serve(rank: int, world_size: int, port: int, channel: Connection) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    sys.path.insert(0, str(ROOT))
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            job = channel.recv()
        except EOFError:
            return
        path, name, args = job
        try:
            channel.send((True, getattr(_load(path), name)(*args)))
        except BaseException:  # noqa: BLE001 - whatever it is, the test is told.
            channel.send((False, traceback.format_exc()))


class Pool:
    """`world_size` processes that run jobs together; restarted after a job that failed."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._workers: list[tuple[Any, Connection]] = []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        port = free_port()
        for rank in range(self.world_size):
            here, there = context.Pipe()
            worker = context.Process(
                target=_serve, args=(rank, self.world_size, port, there), daemon=False
            )
            worker.start()
            there.close()
            self._workers.append((worker, here))

    def run(self, job: Callable[..., Any], *args: Any, timeout: float = 240.0) -> list[Any]:
        """What each rank's `job(*args)` returned, by rank."""
        if not self._workers:
            self._start()
        path = sys.modules[job.__module__].__file__
        for _, channel in self._workers:
            channel.send((path, job.__name__, args))
        results: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        while len(results) < self.world_size:
            waiting = {c: r for r, (_, c) in enumerate(self._workers) if r not in results}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self.close()
                raise TimeoutError(f"{job.__name__}: ranks {sorted(waiting.values())} hang")
            for channel in ready:
                rank = waiting[channel]  # type: ignore[index]
                try:
                    done, value = channel.recv()  # type: ignore[union-attr]
                except EOFError:
                    done, value = False, "the process died"
                if not done:
                    self.close()
                    raise AssertionError(f"rank {rank} failed:\n{value}")
                results[rank] = value
        return [results[rank] for rank in range(self.world_size)]

    def close(self) -> None:
        """End the processes.

        One that waits for a job ends by itself, and with it what it has started (Megatron keeps a
        process for writing checkpoints); one that hangs does not.
        """
        for _, channel in self._workers:
            channel.close()
        deadline = time.monotonic() + 5
        for worker, _ in self._workers:
            worker.join(max(0.0, deadline - time.monotonic()))
        for worker, _ in self._workers:
            if worker.is_alive():
                worker.terminate()
                worker.join(10)
            if worker.is_alive():
                worker.kill()
        self._workers = []
