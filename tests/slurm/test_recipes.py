"""The recipes on a real Slurm, two nodes x two ranks: stopped or crashed, a run is the same run."""

import json
import math
import os
import re
import subprocess
import sys
import time

import pytest

from tests.helpers.pool import ROOT
from tests.helpers.recipe_runs import (
    PREFERENCES,
    REWARD,
    TENSOR_2,
    execute,
    read_rows,
    write_yaml,
    zero,
)
from tests.slurm.conftest import Desk
from tools.make_addition_task import write_task

# Imports alone take a minute where other work shares the cores.
pytestmark = pytest.mark.timeout(900)
PATIENCE = 240.0

# Long enough to be stopped twice, with a checkpoint before each.
GRPO = ("train.num_rollout_batches=12", "train.ppo_epochs=1", "train.save_interval=2")
QUIET = ("evaluation=", "logging.tensorboard=false")


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    write_task(folder, seed=0, repeats=1)
    (folder / "reward.py").write_text(REWARD)
    for name in PREFERENCES:
        lines = (folder / name).read_text().splitlines(keepends=True)
        (folder / name).write_text("".join(lines[:64]))
    for recipe in ("grpo", "dpo"):
        write_yaml(recipe, folder)
    return folder


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The one file that a site edits."""
    file = tmp_path_factory.mktemp("site") / "cluster.env"
    python = f"RL_PYTHON={sys.executable}"
    file.write_text(f"SBATCH_GPUS_PER_NODE=2\nRL_GPUS_PER_NODE=2\nOMP_NUM_THREADS=1\n{python}\n")
    return file


@pytest.fixture(scope="module")
def tool(desk, site):
    """tools/submit.py: the finished process."""

    def call(*words, code=0, **values):
        command = [sys.executable, str(ROOT / "tools/submit.py"), *map(str, words)]
        environment = desk.cluster.environment | {"RL_CLUSTER_ENV": str(site)} | values
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    return call


def submit(tool, desk: Desk, recipe, task, name, *words, split=TENSOR_2, **values):
    """The numbers of the jobs that a run became, and its folder."""
    folder = desk.folder / name
    config = task / f"{recipe}.yaml"
    settings = (f"output_dir={folder}", *QUIET, *split)
    options = ("--", "--exclusive", "--time=30")
    tool(config, f"--recipe={recipe}", "--nodes=2", *settings, *words, *options, **values)
    return json.loads((folder / "jobs.json").read_text())["jobs"], folder


def log_of(folder, job):
    return (folder / f"logs/{job}.out").read_text()


def finish(desk: Desk, folder, job, seconds=PATIENCE):
    found = desk.cluster.wait(job, seconds)
    assert found["JobState"] == "COMPLETED", log_of(folder, job)
    return found


def wait_for_step(folder, step, seconds=PATIENCE):
    """Until the run has written the metrics of a step."""
    end = time.monotonic() + seconds
    metrics = folder / "metrics.jsonl"
    while not (metrics.exists() and any(row["step"] >= step for row in read_rows(metrics))):
        assert time.monotonic() < end, f"{folder}: no step {step} within {seconds} s"
        time.sleep(0.1)


def numbers(folder):
    """The metrics of a run, without what it took to get them."""
    rows = read_rows(folder / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


def digests(*folders):
    done = execute("tools/weights_digest.py", *(folder / "checkpoints" for folder in folders))
    assert done.returncode == 0, done.stderr
    return [line.split()[0] for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def unbroken(tool, desk, task):
    (job,), folder = submit(tool, desk, "grpo", task, "unbroken", *GRPO)
    finish(desk, folder, job)
    return folder


def test_grpo_with_a_signal_and_a_crashed_node(tool, desk, task, unbroken):
    """One save and one requeue, one node lost and one requeue: the weights of the unbroken run."""
    (job,), folder = submit(tool, desk, "grpo", task, "broken", *GRPO)
    wait_for_step(folder, 4)
    desk.cluster.call("scancel", "--signal=USR1", "--batch", job)
    desk.cluster.start_again(job)
    saved = int((folder / "checkpoints/latest_checkpointed_iteration.txt").read_text())
    assert tool("--status", folder).count(f"job {job}: ") == 1
    wait_for_step(folder, saved + 5)
    node = desk.cluster.job(job)["NodeList"].removeprefix("node[").removesuffix("]")[-1]
    desk.cluster.crash(int(node))
    desk.cluster.start_again(job)
    desk.cluster.boot(int(node))
    assert finish(desk, folder, job)["Restarts"] == "2"

    log = log_of(folder, job)
    assert log.count("saved: requeued") == 1 and "NODE FAILURE" in log
    assert [f"attempt {n}:" in log for n in (1, 2, 3)] == [True] * 3
    assert len(list((folder / "logs").glob("attempt_*"))) == 3
    assert numbers(folder) == numbers(unbroken)
    first, second = digests(folder, unbroken)
    assert first == second
    status = tool("--status", folder)
    assert "COMPLETED, exit code 0" in status and "attempt 3, step 24" in status


def test_dpo_after_its_cache(tool, desk, task):
    """The cache is a job, training waits for it by afterok, and finds every row. A task per GPU."""
    words = ("train.num_steps=4", f"reference.cache={desk.folder / 'ref_cache'}")
    (cache, train), folder = submit(tool, desk, "dpo", task, "dpo", *words, RL_LAUNCH="task")
    assert desk.cluster.job(train)["Dependency"].startswith(f"afterok:{cache}")
    # A second job of the run would write to the same files.
    refused = ("--recipe=dpo", "--nodes=2", f"output_dir={folder}", *QUIET, *TENSOR_2, *words)
    assert "is in the queue" in tool(task / "dpo.yaml", *refused, code=2)
    finish(desk, folder, train, 2 * PATIENCE)
    assert desk.cluster.job(cache)["JobState"] == "COMPLETED"
    assert len(numbers(folder)) >= 4
    assert (folder / f"logs/cache-{cache}.out").exists()


def test_grpo_with_zero_3_goes_on_after_a_signal(tool, desk, task, unbroken):
    """One save and one requeue on four ranks, and the numbers of Megatron's run of the same."""
    zero_3 = zero(3, desk.folder)
    (job,), folder = submit(tool, desk, "grpo", task, "zero", *GRPO, split=zero_3)
    wait_for_step(folder, 4)
    desk.cluster.call("scancel", "--signal=USR1", "--batch", job)
    desk.cluster.start_again(job)
    assert finish(desk, folder, job)["Restarts"] == "1"
    log = log_of(folder, job)
    assert log.count("saved: requeued") == 1 and "ZeRO stage 3 over 4" in log
    found, expected = numbers(folder), numbers(unbroken)
    assert [row["step"] for row in found] == [row["step"] for row in expected]
    for row, other in zip(found, expected, strict=True):
        for name in ("reward/mean", "loss/policy", "policy/entropy"):
            assert row[name] == pytest.approx(other[name], rel=1e-2, abs=1e-4), name


def test_dpo_with_zero_3_after_its_cache(tool, desk, task):
    words = ("train.num_steps=4", f"reference.cache={desk.folder / 'zero_cache'}")
    zero_3 = zero(3, desk.folder)
    (cache, train), folder = submit(
        tool, desk, "dpo", task, "zero_dpo", *words, split=zero_3, RL_LAUNCH="task"
    )
    finish(desk, folder, train, 2 * PATIENCE)
    assert desk.cluster.job(cache)["JobState"] == "COMPLETED"
    first, *rest = [row for row in numbers(folder) if "loss/dpo" in row]
    assert first["loss/dpo"] == pytest.approx(math.log(2), abs=1e-5)
    assert len(rest) == 3 and "no reference is held" in log_of(folder, train)


def test_cut_network_ends_by_the_watchdog(tool, desk, task):
    """Both nodes reach the controller and not each other: srun alone would wait for ever."""
    words = (*GRPO, "train.num_rollout_batches=100", "cluster.timeout_minutes=0.5")
    words = tuple(word for word in words if word != GRPO[0])
    (job,), folder = submit(tool, desk, "grpo", task, "cut", *words, RL_END_SECONDS="5")
    wait_for_step(folder, 2)
    nodes = [int(n) for n in re.findall(r"\d", desk.cluster.job(job)["NodeList"])]
    begun = time.monotonic()
    desk.cluster.isolate(*nodes)
    found = desk.cluster.wait(job, PATIENCE)
    desk.cluster.isolate(*nodes, on=False)
    log = log_of(folder, job)
    assert (found["JobState"], found["ExitCode"]) == ("FAILED", "1:0"), log
    assert time.monotonic() - begun < 120
    assert "other nodes do not answer" in log
    assert re.search(r"^rank \d on node\d ended with exit code 1$", log, re.MULTILINE), log


def test_failing_rank_of_a_recipe(tool, desk, task, tmp_path):
    """The log ends with the traceback of the rank that failed, and Slurm has its code."""
    reward = tmp_path / "reward.py"
    reward.write_text(
        "import os\n\n\ndef fails(prompt, response, answer):\n"
        "    if os.environ['RANK'] == '2':\n        raise ValueError('the fault of a reward')\n"
        "    return 0.0\n"
    )
    words = (f"rewards=[{{name: python, path: '{reward}:fails'}}]", *GRPO)
    (job,), folder = submit(tool, desk, "grpo", task, "failing", *words)
    found = desk.cluster.wait(job, PATIENCE)
    log = log_of(folder, job)
    assert (found["JobState"], found["ExitCode"]) == ("FAILED", "1:0"), log
    last = log[-2000:]
    assert "the fault of a reward" in last and last.splitlines()[-2].startswith("rank 2 on node")


def test_mistake_is_not_requeued(desk, task):
    """A job by hand, without tools/submit.py, and with a setting that does not exist."""
    words = (str(task / "grpo.yaml"), "optimizer.learning_rate=1")
    job = desk.submit("mistake", *words, job="grpo")
    log = desk.finish(job, "mistake", "FAILED")
    found = desk.cluster.job(job)
    assert (found["ExitCode"], found["Restarts"]) == ("2:0", "0"), log
    assert "optimizer.learning_rate" in log[-1500:] and "lr" in log[-1500:]


def test_environment_of_the_tests_is_clean():
    """What a site or a batch shell sets must not reach these jobs."""
    assert not [name for name in os.environ if name.startswith(("SLURM_", "SBATCH_", "RL_"))]
