"""A trainer without a model, which keeps what the recipes promise to the jobs around them.

    stub_trainer.py FOLDER [steps=10] [seconds=0.2] [patience=20]
                    [fail=RANK:STEP:CODE] [hang=RANK:STEP]

Its ranks meet at MASTER_ADDR:MASTER_PORT in every step, as in a collective, and a rank that waits
for `patience` seconds fails. A signal is agreed on at the end of a step: rank 0 saves, and all end
with 75. It goes on where it was. `fail` and `hang` happen in the first attempt only. FOLDER gets
who was where, the lines of each step, how often it was saved, and at the end a number that only an
unbroken sequence of steps gives.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

REQUEUE = 75
MODULUS = 2**31 - 1


class Peers:
    """All ranks of the job, joined through rank 0."""

    def __init__(self, patience: float) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._links: list[socket.socket] = []
        if self.rank == 0:
            server = socket.create_server(("", address[1]), backlog=self.size)
            server.settimeout(60)
            self._links = [server.accept()[0] for _ in range(self.size - 1)]
        else:
            self._links = [self._connect(address)]
        for link in self._links:
            link.settimeout(patience)

    @staticmethod
    def _connect(address: tuple[str, int]) -> socket.socket:
        end = time.monotonic() + 60
        while True:
            try:
                return socket.create_connection(address, timeout=10)
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)

    def maximum(self, value: int) -> int:
        """The largest value of all ranks; at most 255."""
        if self.rank:
            self._links[0].sendall(bytes([value]))
            return self._receive(self._links[0])
        largest = max([value, *map(self._receive, self._links)])
        for link in self._links:
            link.sendall(bytes([largest]))
        return largest

    @staticmethod
    def _receive(link: socket.socket) -> int:
        got = link.recv(1)
        if not got:
            raise ConnectionError("a peer has gone")
        return got[0]


def load(path: Path) -> dict[str, int]:
    """The state that was saved, or that of a new run."""
    if path.exists():
        return json.loads(path.read_text())
    return {"step": 0, "number": 1, "saves": 0, "attempt": 0}


def save(path: Path, state: dict[str, int]) -> None:
    """Write the state, whole or not at all."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(state))
    new.replace(path)


def main() -> int:
    """0 at the last step, 75 after a signal."""
    folder = Path(sys.argv[1])
    words = dict(word.split("=", 1) for word in sys.argv[2:])
    stop = []
    for signum in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
        signal.signal(signum, lambda number, _: stop.append(number))
    rank = int(os.environ["RANK"])
    folder.mkdir(parents=True, exist_ok=True)
    state = load(folder / "state.json")
    first = int(os.environ.get("SLURM_RESTART_COUNT", "0")) == 0
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "SLURM_NODEID")
    seen = {name: os.environ.get(name) for name in names}
    seen |= {name: os.environ.get(name) for name in ("MASTER_ADDR", "SLURM_JOB_END_TIME")}
    attempt = folder / f"attempt_{os.environ.get('SLURM_RESTART_COUNT', '0')}"
    attempt.mkdir(exist_ok=True)
    (attempt / f"rank_{rank}.json").write_text(json.dumps(seen | {"host": socket.gethostname()}))

    peers = Peers(float(words.get("patience", "20")))
    while state["step"] < int(words.get("steps", "10")):
        time.sleep(float(words.get("seconds", "0.2")))
        step = state["step"] + 1
        if first and words.get("hang") == f"{rank}:{step}":
            time.sleep(600)
        if first and words.get("fail", "").startswith(f"{rank}:{step}:"):
            sys.stderr.write("Traceback (most recent call last):\n  the fault of this rank\n")
            return int(words["fail"].rpartition(":")[2])
        state |= {"step": step, "number": state["number"] * 48271 % MODULUS}
        agreed = peers.maximum(1 if stop else 0)
        if rank == 0:
            with (folder / "metrics.jsonl").open("a") as metrics:
                metrics.write(json.dumps({"step": step}) + "\n")
            sys.stdout.write(f"step {step}\n")
        if agreed:
            state["saves"] += 1
            if rank == 0:
                save(folder / "state.json", state)
            return REQUEUE
    if rank == 0:
        save(folder / "state.json", state)
        sys.stdout.write("done\n")
    return 0


if __name__ == "__main__":
    try:
        code = main()
    except ConnectionError as error:
        # As in the recipes: what another rank has caused is no news.
        sys.stderr.write(f"{error}\n")
        code = 1
    # Python takes its handlers down as it ends, and the next signal would kill the rank.
    for signum in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    sys.exit(code)
