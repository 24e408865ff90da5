"""Runs that are killed, stopped, broken or stuck, from their command line."""

import os
import signal
import subprocess
import sys
import time

import pytest

from rl_megatron.metrics.jsonl import read_jsonl
from tests.helpers.pool import ROOT, free_port
from tests.helpers.recipe_runs import execute
from tools.chaos import differences

ALONE = "parallel.tensor_model_parallel_size=2"


class Ranks:
    """Two ranks of a recipe, without a launcher that would end one after the other."""

    def __init__(self, recipe, task, folder, *overrides):
        port = str(free_port())
        words = [str(task / f"{recipe}.yaml"), f"output_dir={folder}", ALONE, *overrides]
        self.logs = [folder.with_name(f"{folder.name}_{rank}.txt") for rank in range(2)]
        self.ranks = []
        for rank, log in enumerate(self.logs):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            with log.open("w") as output:
                command = [sys.executable, f"recipes/{recipe}/train.py", *words]
                self.ranks.append(
                    subprocess.Popen(
                        command, cwd=ROOT, stdout=output, stderr=output, env=environment
                    )
                )

    def codes(self, seconds=120):
        """Exit codes; a rank that is not gone in time fails the test."""
        deadline = time.monotonic() + seconds
        try:
            return [rank.wait(max(0.1, deadline - time.monotonic())) for rank in self.ranks]
        finally:
            for rank in self.ranks:
                rank.kill()

    def said(self, rank):
        return self.logs[rank].read_text()


def wait_for_steps(folder, steps):
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        path = folder / "metrics.jsonl"
        if path.exists() and sum(1 for _ in read_jsonl(path)) >= steps:
            return
        time.sleep(0.01)
    raise TimeoutError(f"{folder} has not made {steps} steps")


SHORT = ("train.num_steps=6", "train.save_interval=2", "evaluation=", "data.eval=")


@pytest.fixture(scope="module")
def unbroken(task, runs):
    ranks = Ranks("sft", task, runs / "unbroken", *SHORT)
    assert ranks.codes() == [0, 0]
    return runs / "unbroken"


def test_sl_04_a_signal_to_one_rank_saves_the_same_step_on_all(task, runs, unbroken):
    folder = runs / "signalled"
    ranks = Ranks("sft", task, folder, *SHORT)
    wait_for_steps(folder, 1)
    ranks.ranks[1].send_signal(signal.SIGUSR1)
    ranks.ranks[0].send_signal(signal.SIGTERM)
    assert ranks.codes() == [75, 75]
    assert "a signal asked for it: saved step" in ranks.said(0)
    again = Ranks("sft", task, folder, *SHORT)
    assert again.codes() == [0, 0]
    assert "the run goes on after step" in again.said(0)
    assert list(differences(folder, unbroken)) == []


def test_sl_03_the_rank_that_fails_ends_the_job_and_is_heard_last(task, runs):
    reward = task / "broken_reward.py"
    reward.write_text(
        "import os\n"
        "def reward(prompt, response, answer):\n"
        "    if os.environ['RANK'] == '1':\n"
        "        raise ValueError('no such digit')\n"
        "    return 1.0\n"
    )
    words = (f"rewards=[{{name: python, path: '{reward}:reward'}}]", "evaluation=")
    began = time.monotonic()
    ranks = Ranks("grpo", task, runs / "failing", *words)
    assert ranks.codes() == [1, 1]
    assert time.monotonic() - began < 60
    assert "ValueError: no such digit" in ranks.said(1)
    *_, last = ranks.said(0).rstrip().splitlines()
    assert "rank 1 failed, and so the job ends:" in ranks.said(0)
    assert last == "ValueError: no such digit"


def test_a_rank_that_hangs_ends_the_job_and_says_where_it_stands(task, runs):
    reward = task / "slow_reward.py"
    reward.write_text(
        "import os, time\n"
        "def reward(prompt, response, answer):\n"
        "    while os.environ['RANK'] == '1':\n"
        "        time.sleep(1)\n"
        "    return 1.0\n"
    )
    words = (f"rewards=[{{name: python, path: '{reward}:reward'}}]", "evaluation=")
    ranks = Ranks("grpo", task, runs / "hanging", *words, "cluster.timeout_minutes=0.2")
    assert ranks.codes() == [1, 1]
    assert "rank 1 has not come further for" in ranks.said(1)
    assert "cluster.timeout_minutes = 0.2" in ranks.said(1)
    assert "slow_reward.py" in ranks.said(1)


def test_killed_runs_end_as_if_nothing_had_happened():
    done = execute("tools/chaos.py", "--kills", "2", "--recipes", "grpo")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 kills" in done.stdout and "0 problems" in done.stdout
