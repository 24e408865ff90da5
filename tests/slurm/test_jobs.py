"""The job files on a real Slurm with a trainer that computes nothing: launch, signals, faults."""

import time

import pytest

from tests.slurm.stub_trainer import MODULUS

# Three steps a second: slow enough to be interrupted, fast enough for a test.
BRISK = "seconds=0.1"


def number_after(steps):
    """What a run has when every step was done once and in order."""
    return pow(48271, steps, MODULUS)


@pytest.mark.parametrize("launch", ["node", "task"])
def test_ranks_of_both_launch_shapes(desk, launch):
    """SL-05."""
    desk.finish(desk.submit(launch, "steps=3", BRISK, RL_LAUNCH=launch), launch)
    ranks = desk.ranks(launch)
    assert [int(rank["RANK"]) for rank in ranks] == [0, 1, 2, 3]
    assert [int(rank["LOCAL_RANK"]) for rank in ranks] == [0, 1, 0, 1]
    assert [int(rank["SLURM_NODEID"]) for rank in ranks] == [0, 0, 1, 1]
    assert {rank["WORLD_SIZE"] for rank in ranks} == {"4"}
    assert {rank["LOCAL_WORLD_SIZE"] for rank in ranks} == {"2"}
    assert {rank["MASTER_ADDR"] for rank in ranks} == {ranks[0]["host"]}
    assert ranks[0]["host"] != ranks[2]["host"]
    # Slurm 22.05 says no end of the job to anybody; the batch shell asks for it.
    assert 25 * 60 < int(ranks[3]["SLURM_JOB_END_TIME"]) - time.time() < 31 * 60


@pytest.mark.parametrize("launch", ["node", "task"])
def test_failing_rank_fails_the_job_with_its_code(desk, launch):
    """SL-03: and its traceback is what the log ends with."""
    name, begun = f"fail_{launch}", time.monotonic()
    job = desk.submit(name, "steps=600", "fail=2:5:9", BRISK, RL_LAUNCH=launch)
    log = desk.finish(job, name, "FAILED")
    assert time.monotonic() - begun < 30
    found = desk.cluster.job(job)
    assert found["ExitCode"] == "9:0" and found["Restarts"] == "0"
    last = log.splitlines()[-4:]
    assert last[0].startswith("Traceback") and "the fault of this rank" in last[1]
    assert last[2].startswith("rank 2 on node") and last[2].endswith("ended with exit code 9")


def test_signal_leads_to_one_save_and_one_requeue(desk):
    """SL-04: the second signal, which comes with the save, does no harm."""
    job = desk.submit("signal", "steps=60", BRISK)
    desk.until("signal", "step 10\n")
    for _ in range(2):
        desk.cluster.call("scancel", "--signal=USR1", "--batch", job)
    desk.cluster.start_again(job)
    log = desk.finish(job, "signal")
    found = desk.cluster.job(job)
    assert found["Restarts"] == "1" and found["ExitCode"] == "0:0"
    assert log.count("saved: requeued") == 1 and "attempt 1:" in log and "attempt 2:" in log
    assert desk.state("signal") | {"saves": 1} == desk.state("signal")
    assert desk.steps("signal") == list(range(1, 61))
    assert desk.state("signal")["number"] == number_after(60)


def test_requeues_end(desk):
    job = desk.submit("limited", "steps=600", BRISK, RL_MAX_RESTARTS="0")
    desk.until("limited", "step 2\n")
    desk.cluster.call("scancel", "--signal=USR1", "--batch", job)
    log = desk.finish(job, "limited", "FAILED")
    assert desk.cluster.job(job)["ExitCode"] == "75:0"
    assert "not requeued: restarted 0 times already (RL_MAX_RESTARTS = 0)" in log


def test_cancelled_job_stays_cancelled(desk):
    job = desk.submit("cancelled", "steps=600", BRISK)
    desk.until("cancelled", "step 2\n")
    desk.cluster.call("scancel", job)
    log = desk.finish(job, "cancelled", "CANCELLED")
    desk.until("cancelled", "ends with code 75")
    assert "requeued" not in log and desk.state("cancelled")["saves"] == 1


def test_hanging_rank_ends_the_job(desk):
    job = desk.submit("hang", "steps=600", "patience=4", "hang=3:4", BRISK)
    log = desk.finish(job, "hang", "FAILED", 60)
    assert "Traceback" in log.partition("ended with exit code 1")[0]


def test_ranks_start_once_the_controller_answers(desk, tmp_path):
    """srun gives up on it, and is tried again."""
    site, go = tmp_path / "cluster.env", tmp_path / "go"
    # Only srun is to ask it, for a node that it does not hear of for long counts as failed.
    site.write_text(
        f"SLURM_JOB_END_TIME=2000000000\necho begun\nuntil [ -e {go} ]; do sleep 0.1; done\n"
    )
    words = {"RL_CLUSTER_ENV": str(site), "RL_RETRY_SECONDS": "2"}
    job = desk.submit("busy", "steps=3", BRISK, **words)
    desk.until("busy", "begun")
    with desk.cluster.busy():
        go.touch()
        desk.until("busy", "srun has started no task")
    log = desk.finish(job, "busy")
    assert "try 2 of 4 in 2 s" in log and desk.cluster.job(job)["Restarts"] == "0"
    assert desk.state("busy")["number"] == number_after(3)
