"""Jobs of slurm/ on a real Slurm; skipped, with the reason, where this machine cannot have one."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.pool import ROOT
from tests.slurm.cluster import Cluster, missing, running

STUB = "tests/slurm/stub_trainer.py"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = missing()
    if reason is not None:
        for item in items:
            if item.path.is_relative_to(Path(__file__).parent):
                item.add_marker(pytest.mark.skip(reason=reason))


@dataclass
class Desk:
    """Submits jobs to a cluster, each with a log and a folder of its own.

    Attributes:
        cluster: Where they run.
        folder: What they leave.
    """

    cluster: Cluster
    folder: Path

    def submit(
        self, name: str, *words: str, job: str = "stub", options: tuple[str, ...] = (), **env: str
    ) -> str:
        """Submit a job file of slurm/, or the stub; its number.

        Args:
            name: Of the job's log; the stub's folder too.
            words: Words of the script.
            job: File of slurm/ without its ending; "stub" is grpo.sbatch with the stub in it.
            options: Of sbatch.
            env: Environment variables on top.
        """
        file = ROOT / f"slurm/{job}.sbatch"
        if job == "stub":
            file = self.folder / "stub.sbatch"
            text = (ROOT / "slurm/grpo.sbatch").read_text(encoding="utf-8")
            assert "recipes/grpo/train.py" in text
            file.write_text(text.replace("recipes/grpo/train.py", STUB), encoding="utf-8")
            words = (str(self.folder / name), *words)
        command = ["sbatch", "--parsable", "--nodes=2", "--exclusive", "--time=30"]
        command += [f"--output={self.log(name)}", f"--chdir={self.folder}", *options]
        environment = {
            "RL_ROOT": str(ROOT),
            "RL_PYTHON": sys.executable,
            "RL_STATE_ROOT": str(self.folder / "state"),
            "SBATCH_GPUS_PER_NODE": "2",
            # This machine's ranks share few cores.
            "OMP_NUM_THREADS": "1",
        }
        return self.cluster.call(*command, str(file), *words, **(environment | env))

    def log(self, name: str) -> Path:
        """Output of a job."""
        return self.folder / f"{name}.log"

    def read(self, name: str) -> str:
        """Output of a job, so far."""
        return self.log(name).read_text(encoding="utf-8") if self.log(name).exists() else ""

    def finish(self, job: str, name: str, state: str = "COMPLETED", seconds: float = 90) -> str:
        """Wait for the job, check its state, and return its output."""
        found = self.cluster.wait(job, seconds)
        assert found["JobState"] == state, f"{found}\n{self.read(name)}"
        return self.read(name)

    def until(self, name: str, text: str, seconds: float = 60) -> None:
        """Wait until the job has written `text`."""
        end = time.monotonic() + seconds
        while text not in self.read(name):
            assert time.monotonic() < end, f"no {text!r} in {seconds:g} s:\n{self.read(name)}"
            time.sleep(0.1)

    def state(self, name: str) -> dict[str, Any]:
        """What the stub has saved."""
        return json.loads((self.folder / name / "state.json").read_text())

    def steps(self, name: str) -> list[int]:
        """The steps in the stub's metrics, in order."""
        lines = (self.folder / name / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["step"] for line in lines]

    def ranks(self, name: str, attempt: int = 0) -> list[dict[str, str]]:
        """Where the stub's ranks were, in order."""
        found = (self.folder / name / f"attempt_{attempt}").glob("rank_*.json")
        return sorted(
            (json.loads(path.read_text()) for path in found), key=lambda r: int(r["RANK"])
        )


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Six nodes."""
    with running(Cluster(6)) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def desk(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Desk:
    """Where jobs of the test file are submitted."""
    return Desk(cluster, tmp_path_factory.mktemp("jobs"))
