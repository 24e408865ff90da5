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
    RUN_CLASSES,
    TENSOR_2,
    execute,
    read_rows,
    write_yaml,
    zero,
)
from tests.slurm.conftest import Desk
from tools.chaos import differences
from tools.make_addition_task import write_task

# Imports alone take a minute where other work shares the cores.
pytestmark = pytest.mark.timeout(900)
PATIENCE = 240.0

# Long enough to be stopped twice, with a checkpoint before each.
GRPO = (
    "train.num_rollout_batches=12",
    "train.ppo_epochs=1",
    "train.save_interval=2",
    "checkpoint.exit_before_end_minutes=0.1",
)
QUIET = ("evaluation=", "logging.tensorboard=false")

# For a first attempt that whatever is to interrupt it cannot miss: seconds of each reward.
SLOW = {"RL_TEST_REWARD_SECONDS": "1"}
SLOW_REWARD = """
import os, time

def digits(prompt, response, answer):
    if os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
        time.sleep(float(os.environ.get("RL_TEST_REWARD_SECONDS", "0")))
    return sum(character.isdigit() for character in response) / 8
"""


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    write_task(folder, seed=0, repeats=1)
    (folder / "reward.py").write_text(SLOW_REWARD)
    for name in ("sft.jsonl", *PREFERENCES):
        lines = (folder / name).read_text().splitlines(keepends=True)
        (folder / name).write_text("".join(lines[:64]))
    for recipe in RUN_CLASSES:
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


def submit(
    tool, desk: Desk, recipe, task, name, *words, split=TENSOR_2, nodes=2, options=(), **values
):
    """The numbers of the jobs that a run became, and its folder."""
    folder = desk.folder / name
    config = task / f"{recipe}.yaml"
    # There is no such section in the run of a reward model.
    quiet = QUIET[1:] if recipe == "reward_model" else QUIET
    settings = (f"--nodes={nodes}", f"output_dir={folder}", *quiet, *split)
    options = ("--", "--exclusive", "--time=30", *options)
    tool(config, f"--recipe={recipe}", *settings, *words, *options, **values)
    return json.loads((folder / "jobs.json").read_text())["jobs"], folder


def log_of(folder, job):
    return (folder / f"logs/{job}.out").read_text()


def finish(desk: Desk, folder, job, seconds=PATIENCE):
    found = desk.cluster.wait(job, seconds)
    assert found["JobState"] == "COMPLETED", all_of(desk, folder, job)
    return found


def all_of(desk: Desk, folder, job):
    """What is known of a run: a job that never began has no log, and another's says why."""
    jobs = {job, *json.loads((folder / "jobs.json").read_text())["jobs"]}
    shown = [str(desk.cluster.job(each)) for each in sorted(jobs)]
    logs = [f"{log}:\n{log.read_text()}" for log in sorted((folder / "logs").glob("*.out"))]
    return "\n\n".join([*shown, *logs, desk.cluster.log()])


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


def nodes_of(desk, job):
    """The numbers of the one or two nodes of a job."""
    return [int(number) for number in re.findall(r"\d", desk.cluster.job(job)["NodeList"])]


def digests(*folders):
    """Of the weights in Hugging Face folders and checkpoints."""
    done = execute("tools/weights_digest.py", *folders)
    assert done.returncode == 0, done.stderr
    return [line.split()[0] for line in done.stdout.splitlines()]


@pytest.fixture(scope="module", autouse=True)
def limited(tool, desk, task):
    """A run whose time limit comes, submitted first: Slurm looks at limits every half minute."""
    limit = ("--time=2", "--signal=B:USR1@90")
    (job,), folder = submit(tool, desk, "grpo", task, "limited", *GRPO, options=limit, **SLOW)
    return job, folder


@pytest.fixture(scope="module")
def unbroken(tool, desk, task):
    (job,), folder = submit(tool, desk, "grpo", task, "unbroken", *GRPO)
    finish(desk, folder, job)
    return folder


def test_grpo_at_its_time_limit(tool, desk, unbroken, limited):
    """The signal that #SBATCH --signal asks for, from Slurm itself; on to the same weights."""
    job, folder = limited
    desk.cluster.wait_until_pending(job, PATIENCE)
    desk.cluster.call("scontrol", "update", f"JobId={job}", "TimeLimit=30")
    desk.cluster.start_again(job)
    assert finish(desk, folder, job)["Restarts"] == "1"
    log = log_of(folder, job)
    assert log.count("SIGUSR1: the ranks save") == 1 and log.count("saved: requeued") == 1
    assert "attempt 1:" in log and "attempt 2:" in log
    assert list(differences(folder, unbroken)) == []


def test_grpo_gives_way_to_a_reward_model_and_loses_a_node(tool, desk, task, unbroken):
    """Preempted it saves and is requeued, and after a crash too: the bits of the unbroken run."""
    low = ("--partition=low",)
    (job,), folder = submit(tool, desk, "grpo", task, "broken", *GRPO, options=low, **SLOW)
    wait_for_step(folder, 2)
    high = ("--partition=high", f"--nodelist=node{nodes_of(desk, job)[0]}")
    (urgent,), reward_model = submit(
        tool, desk, "reward_model", task, "urgent", nodes=1, options=high
    )
    desk.cluster.start_again(job)
    saved = int((folder / "checkpoints/latest_checkpointed_iteration.txt").read_text())
    assert tool("--status", folder).count(f"job {job}: ") == 1
    wait_for_step(folder, saved + 5)
    node = nodes_of(desk, job)[-1]
    desk.cluster.crash(node)
    desk.cluster.start_again(job)
    desk.cluster.boot(node)
    assert finish(desk, folder, job)["Restarts"] == "2"
    finish(desk, reward_model, urgent)
    steps = [row["step"] for row in numbers(reward_model) if "loss/reward_model" in row]
    assert steps == [1, 2, 3, 4]

    log = log_of(folder, job)
    assert log.count("saved: requeued") == 1 and "NODE FAILURE" in log
    assert [f"attempt {n}:" in log for n in (1, 2, 3)] == [True] * 3
    assert len(list((folder / "logs").glob("attempt_*"))) == 3
    assert list(differences(folder, unbroken)) == []
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


def test_kto_array_of_seeds_after_its_cache(tool, desk, task):
    """SL-06: one task alone is requeued, and each has the numbers of its own seed."""
    words = (f"reference.cache={desk.folder / 'kto_cache'}", "data.eval=")
    words += ("train.num_steps=80", "train.save_interval=20")
    alone = {"nodes": 1, "split": (), "RL_GPUS_PER_NODE": "1"}
    (cache, array), folder = submit(
        tool, desk, "kto", task, "seeds", "--seeds=4-5", *words, **alone
    )
    one, other = folder / "seed_4", folder / "seed_5"
    wait_for_step(other, 2)
    # The number of the array is that of one of its tasks too.
    desk.cluster.call("scancel", "--signal=USR1", "--batch", f"{array}_5")
    (job,), unbroken = submit(
        tool, desk, "kto", task, "seed_5", "--one-job", "seed=5", *words, **alone
    )
    desk.cluster.start_again(f"{array}_5")
    found = [finish(desk, folder, f"{array}_{seed}") for seed in (4, 5)]
    assert [each["Restarts"] for each in found] == ["0", "1"]
    logs = [log_of(folder, f"{array}_{seed}") for seed in (4, 5)]
    assert [log.count("saved: requeued") for log in logs] == [0, 1]
    assert len({re.search(r"rendezvous \S+:(\d+)", log)[1] for log in logs}) == 2
    assert desk.cluster.job(cache)["JobState"] == "COMPLETED"
    finish(desk, unbroken, job)
    assert list(differences(other, unbroken)) == []
    assert numbers(one) != numbers(other)


def test_sft_and_conversions(tool, desk, task):
    """A run is exported by a job after it; a model is imported by two ranks."""
    (job,), folder = submit(tool, desk, "sft", task, "sft", nodes=1)
    exported, imported = desk.folder / "exported", desk.folder / "imported"
    split = "tensor_model_parallel_size=2"
    into = ("import", "--hf", str(task / "model"), "--output", str(imported), split)
    out = ("export", "--checkpoint", str(folder / "checkpoints"), "--output", str(exported))
    jobs = {
        "import": desk.submit("import", *into, job="convert", options=("--nodes=1",)),
        "export": desk.submit(
            "export",
            *out,
            job="convert",
            options=("--nodes=1", f"--dependency=afterok:{job}"),
            RL_GPUS_PER_NODE="1",
        ),
    }
    finish(desk, folder, job)
    for name, number in jobs.items():
        assert "wrote " in desk.finish(number, name, seconds=PATIENCE)
    model, of_import, trained, of_export = digests(
        task / "model", imported, folder / "checkpoints", exported
    )
    assert of_import == model and of_export == trained != model


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
    nodes = nodes_of(desk, job)
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
