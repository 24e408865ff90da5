"""The job files with stand-ins for Slurm's programs; tests/slurm runs them on a real one."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.helpers.pool import ROOT, free_port
from tests.slurm.stub_trainer import MODULUS

JOBS = sorted((ROOT / "slurm").glob("*.sbatch"))

# Starts the tasks of a step, on one machine; ends them when one fails, as --kill-on-bad-exit does.
SRUN = r"""
import os, signal, subprocess, sys
words = sys.argv[1:]
(open(os.environ["STUB"] + "/srun", "a")).write(" ".join(words) + "\n")
count = next(i for i, word in enumerate(words) if not word.startswith("-"))
options = dict(word[2:].partition("=")[::2] for word in words[:count])
per_node = int(options["ntasks-per-node"])
tasks = []
for task in range(int(options["ntasks"])):
    ids = {"SLURM_PROCID": task, "SLURM_NODEID": task // per_node, "SLURM_LOCALID": task % per_node}
    environment = os.environ | {name: str(value) for name, value in ids.items()}
    tasks.append(subprocess.Popen(words[count:], env=environment))
open(os.environ["STUB"] + "/pids", "w").write(" ".join(str(task.pid) for task in tasks))
signal.signal(signal.SIGTERM, lambda *_: [task.terminate() for task in tasks])
codes = {}
while len(codes) < len(tasks):
    pid, status = os.wait()
    codes[pid] = os.waitstatus_to_exitcode(status)
    if codes[pid] and options["kill-on-bad-exit"] == "1":
        for task in tasks:
            if task.pid not in codes:
                os.kill(task.pid, signal.SIGTERM)
sys.exit(max(code if code >= 0 else 128 - code for code in codes.values()))
"""
SCONTROL = """
echo "scontrol $*" >>"$STUB/calls"
case "$*" in
  "show hostnames "*) [ -e "$STUB/hostnames" ] && cat "$STUB/hostnames" ;;
  *"show job"*) echo "JobId=1 JobState=$(cat "$STUB/job_state") EndTime=2030-01-01T00:00:00 X=1" ;;
esac
"""
SCANCEL = """
echo "scancel $*" >>"$STUB/calls"
kill -USR1 $(cat "$STUB/pids")
"""


# A rank that tells some of its variables, in a line that other ranks cannot cut in two.
TELL = """
import os
told = ["I", *map(os.environ.get, {names})]
os.write(1, (" ".join(told) + "\\n").encode())
"""


class Batch:
    """A job without Slurm: its batch shell runs here, and so do its tasks."""

    def __init__(self, folder):
        self.folder = folder
        self.bin = folder / "bin"
        self.bin.mkdir()
        self._program("srun", f"#!{sys.executable}\n{SRUN}")
        self._program("scontrol", f"#!/usr/bin/env bash\n{SCONTROL}")
        self._program("scancel", f"#!/usr/bin/env bash\n{SCANCEL}")
        (folder / "job_state").write_text("RUNNING")
        self.processes = []

    def _program(self, name, text):
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def keep_busy(self, program, times):
        """Let the first calls of a program fail, as those of a controller that does not answer."""
        other = self.bin / f"{program}.other"
        (self.bin / program).rename(other)
        count = f"{self.folder}/{program}.tries"
        text = f'echo >>{count}; [ "$(wc -l <{count})" -gt {times} ] || exit 1; exec {other} "$@"\n'
        self._program(program, f"#!/usr/bin/env bash\n{text}")

    def environment(self, **extra):
        kept = {"PATH": f"{self.bin}:{os.environ['PATH']}", "HOME": os.environ.get("HOME", "/")}
        slurm = {
            "SLURM_JOB_ID": "812345",
            "SLURM_NNODES": "2",
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SLURM_CPUS_ON_NODE": "64",
            "SLURM_SUBMIT_DIR": str(ROOT),
            "RL_GPUS_PER_NODE": "2",
            "RL_PYTHON": sys.executable,
            "RL_STATE_ROOT": str(self.folder / "state"),
            "RL_CLUSTER_ENV": os.devnull,
            "RL_START_SECONDS": "0",
            "RL_RETRY_SECONDS": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "STUB": str(self.folder),
        }
        values = kept | slurm | extra
        return {name: value for name, value in values.items() if value is not None}

    def start(self, *words, script="tests/slurm/stub_trainer.py", **extra):
        """The batch shell of grpo.sbatch, with the stub in the recipe's place."""
        text = (ROOT / "slurm/grpo.sbatch").read_text()
        assert "recipes/grpo/train.py" in text
        job = self.folder / "job.sbatch"
        job.write_text(text.replace("recipes/grpo/train.py", script))
        self.output = (self.folder / "output").open("w")
        process = subprocess.Popen(
            ["bash", str(job), str(self.folder / "run"), *words],
            cwd=self.folder,
            env=self.environment(**extra),
            stdout=self.output,
            stderr=subprocess.STDOUT,
        )
        self.processes.append(process)
        return process

    def run(self, *words, **extra):
        """Exit code and output of a whole job."""
        code = self.start(*words, **extra).wait(60)
        return code, self.said

    @property
    def said(self):
        return (self.folder / "output").read_text()

    def until(self, text):
        end = time.monotonic() + 30
        while text not in self.said:
            assert time.monotonic() < end, self.said
            time.sleep(0.02)

    def calls(self, word):
        found = self.folder / "calls"
        lines = found.read_text().splitlines() if found.exists() else []
        return [line for line in lines if line.startswith(word)]

    def state(self):
        return json.loads((self.folder / "run/state.json").read_text())

    def ranks(self):
        found = (self.folder / "run/attempt_0").glob("rank_*.json")
        return sorted((json.loads(p.read_text()) for p in found), key=lambda r: int(r["RANK"]))


@pytest.fixture
def batch(tmp_path):
    made = Batch(tmp_path)
    yield made
    for process in made.processes:
        process.kill()


def shell(text, **environment):
    """What bash prints, with env.sh sourced."""
    values = {"PATH": os.environ["PATH"], "RL_ROOT": str(ROOT), "RL_CLUSTER_ENV": os.devnull}
    done = subprocess.run(
        ["bash", "-c", f". {ROOT}/slurm/env.sh; {text}"],
        env=values | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.mark.parametrize("job", JOBS, ids=lambda path: path.name)
def test_what_every_job_asks_slurm_for(job):
    """SL-04: and what belongs to a site stands in no job."""
    text = job.read_text()
    lines = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    assert {"#SBATCH --requeue", "#SBATCH --open-mode=append"} <= set(lines)
    assert "#SBATCH --ntasks-per-node=1" in lines
    assert ("#SBATCH --signal=B:USR1@300" in lines) == (job.stem != "convert")
    for option in ("partition", "account", "gpus", "gres", "qos"):
        assert f"--{option}" not in text
    assert len(text.splitlines()) <= 25


def test_ports_of_neighbours_differ():
    """SL-06."""
    jobs = [{"SLURM_JOB_ID": "812345"}, {"SLURM_JOB_ID": "812346"}]
    jobs += [{"SLURM_JOB_ID": "900000", "SLURM_ARRAY_TASK_ID": n} for n in ("1", "2")]
    ports = [int(shell("job_port", **job)) for job in jobs]
    assert len(set(ports)) == 4 and all(20000 <= port <= 32767 for port in ports)
    assert shell("job_port", **jobs[0]) == str(ports[0])


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("node[1-2]", "node1"),
        ("tux[001-064,070]", "tux001"),
        ("a7,b[1-2]", "a7"),
        ("rack[2-3]n[01-16,20],x1", "rack2n01"),
        ("gpu-[5,9]-ib", "gpu-5-ib"),
    ],
)
def test_first_host_without_scontrol(nodes, first):
    assert shell(f"first_host '{nodes}'") == first


def test_head_node(batch):
    """From scontrol where it answers, from the list of nodes where it does not."""
    find = "find_rendezvous; echo $MASTER_ADDR"
    job = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "tux[03-04]", "STUB": str(batch.folder)}
    path = f"{batch.bin}:{os.environ['PATH']}"
    assert shell(find, **job, PATH=path) == "tux03"
    (batch.folder / "hostnames").write_text("tux03.site\ntux04.site\n")
    assert shell(find, **job, PATH=path) == "tux03.site"
    assert shell(find, **job, PATH=path, MASTER_ADDR="10.0.0.1") == "10.0.0.1"


@pytest.mark.parametrize(("launch", "cpus"), [("node", "64"), ("task", "8")])
def test_ranks_on_two_nodes_of_eight(batch, launch, cpus):
    """SL-05."""
    # The ranks need not meet; each tells where it is.
    where = batch.folder / "where.py"
    names = ("RANK", "LOCAL_RANK", "SLURM_NODEID", "WORLD_SIZE", "SRUN_CPUS_PER_TASK")
    where.write_text(TELL.format(names=names))
    (batch.folder / "job.sbatch").touch()
    script = os.path.relpath(where, ROOT)
    code, said = batch.run(script=script, RL_GPUS_PER_NODE="8", RL_LAUNCH=launch)
    assert code == 0, said
    rows = sorted(
        [int(n) for n in line.split()[1:]] for line in said.splitlines() if line[0] == "I"
    )
    assert rows == [[rank, rank % 8, rank // 8, 16, int(cpus)] for rank in range(16)]
    (line,) = (batch.folder / "srun").read_text().splitlines()
    tasks = {"node": "--ntasks=2 --ntasks-per-node=1", "task": "--ntasks=16 --ntasks-per-node=8"}
    assert f"--nodes=2 {tasks[launch]}" in line and "--kill-on-bad-exit=1" in line
    assert "--wait=" in line


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"SLURM_NTASKS_PER_NODE": "8"}, "--ntasks-per-node=8: RL_LAUNCH=node starts one task"),
        (
            {"RL_LAUNCH": "task", "SLURM_NTASKS_PER_NODE": "3"},
            "--ntasks-per-node=3: RL_LAUNCH=task",
        ),
        ({"RL_LAUNCH": "ssh"}, "RL_LAUNCH = ssh: must be node"),
        ({"RL_LAUNCH": "task", "SLURM_CPUS_ON_NODE": "1"}, "give sbatch --exclusive"),
        ({"RL_GPUS_PER_NODE": None}, "RL_GPUS_PER_NODE = '': set it in cluster.env"),
        ({"RL_RETRY_SECONDS": "soon"}, "RL_RETRY_SECONDS = soon: must be a number of seconds"),
        ({"MASTER_PORT": "80"}, "MASTER_PORT = 80: must be a port"),
        ({"RL_CLUSTER_ENV": "/nowhere"}, "RL_CLUSTER_ENV = /nowhere: there is no such file"),
        ({"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2"}, "write %a where they differ"),
    ],
)
def test_refused_before_anything_starts(batch, environment, message):
    code, said = batch.run(**environment)
    assert code == 2 and message in said and not (batch.folder / "srun").exists()


def test_gpus_that_a_task_does_not_see(batch):
    """--gpus-per-task shows each task one GPU, and LOCAL_RANK counts those of the node."""
    code, said = batch.run(RL_LAUNCH="task", CUDA_VISIBLE_DEVICES="0")
    assert code == 2 and "give sbatch --gpus-per-node, not --gpus-per-task" in said
    code, said = batch.run("steps=1", "seconds=0", RL_LAUNCH="task", CUDA_VISIBLE_DEVICES="2,5")
    assert code == 0, said


def test_nodes_must_see_one_file_system(batch):
    """The stand-in for srun takes the folder away, as if the task were on another node."""
    srun = batch.bin / "srun"
    line = "import shutil; shutil.rmtree(os.environ['RL_STATE_FOLDER'])\n"
    srun.write_text(srun.read_text().replace("words = sys", f"{line}words = sys"))
    code, said = batch.run()
    # There is no place to leave the code of the first task, so it may be that of an ended one.
    assert (
        code in (2, 143) and "RL_STATE_ROOT must be on a file system that every node sees" in said
    )


def test_site_file(batch):
    """Its values reach the ranks, a container's arguments srun; the environment wins over it."""
    site = batch.folder / "cluster.env"
    site.write_text(
        "RL_GPUS_PER_NODE=1\nRL_SOCKET_IFNAME=ib0\nexport NCCL_DEBUG=WARN\n"
        'RL_CONTAINER_IMAGE=/images/train.sqsh\nRL_CONTAINER_MOUNTS="/data:/data,/runs:/runs"\n'
        'RL_CONTAINER_ARGS="--no-container-mount-home --container-writable"\nRL_LAUNCH=task\n'
    )
    tell = batch.folder / "tell.py"
    names = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_DEBUG", "RL_LAUNCH")
    tell.write_text(TELL.format(names=names))
    words = {"RL_CLUSTER_ENV": str(site), "RL_GPUS_PER_NODE": None, "RL_LAUNCH": "node"}
    code, said = batch.run(script=os.path.relpath(tell, ROOT), **words)
    assert code == 0 and said.count("I ib0 ib0 WARN node") == 2, said
    line = (batch.folder / "srun").read_text()
    assert "--container-image=/images/train.sqsh" in line
    assert "--container-mounts=/data:/data,/runs:/runs" in line
    assert f"--container-workdir={batch.folder}" in line
    assert "--no-container-mount-home --container-writable" in line


def test_signal_save_requeue(batch):
    """SL-04: in step 3; then again with SLURM_RESTART_COUNT=1."""
    job = batch.start("steps=8", "seconds=0.3")
    batch.until("step 2\n")
    # The second one comes with the save.
    for _ in range(2):
        job.send_signal(signal.SIGUSR1)
        time.sleep(0.1)
    assert job.wait(30) == 75
    saved = batch.state()
    assert saved["saves"] == 1 and 3 <= saved["step"] < 8
    assert batch.calls("scontrol requeue") == ["scontrol requeue 812345"]
    assert {line for line in batch.calls("scancel")} == {"scancel --signal=USR1 812345"}

    code, said = batch.run("steps=8", "seconds=0", SLURM_RESTART_COUNT="1")
    assert code == 0 and f"step {saved['step'] + 1}\n" in said and "step 3\n" not in said
    assert batch.state()["number"] == pow(48271, 8, MODULUS)
    assert len(batch.calls("scontrol requeue")) == 1


def test_controller_that_is_busy(batch):
    """srun and the requeue are tried again."""
    for program in ("srun", "scontrol"):
        batch.keep_busy(program, 1)
    job = batch.start("steps=50", "seconds=0.1")
    batch.until("step 2\n")
    # It was asked for a host and for the end of the job before.
    (batch.folder / "scontrol.tries").unlink()
    job.send_signal(signal.SIGUSR1)
    assert job.wait(30) == 75
    assert batch.said.count("srun has started no task") == 1
    assert batch.said.count("the controller may be busy: try 2 of 4 in 1 s") == 2
    assert batch.state()["saves"] == 1
    assert batch.calls("scontrol requeue") == ["scontrol requeue 812345"]


def test_controller_that_never_answers(batch):
    batch.keep_busy("srun", 4)
    code, said = batch.run("steps=1", RL_RETRY_SECONDS="0")
    assert code == 1 and said.count("srun has started no task") == 4
    assert "ends with code 1" in said and not (batch.folder / "run").exists()


def test_signal_while_the_controller_is_busy(batch):
    """No answer is no end of the job: the signal is sent again."""
    batch.keep_busy("scancel", 1)
    job = batch.start("steps=300", "seconds=0.1")
    batch.until("step 2\n")
    job.send_signal(signal.SIGUSR1)
    assert job.wait(30) == 75 and batch.state()["saves"] == 1


@pytest.mark.parametrize(("state", "requeued"), [("CANCELLED", 0), ("TIMEOUT", 1)])
def test_sigterm_saves_too(batch, state, requeued):
    """Slurm sends it to batch shell and steps at once, and the job has its next state."""
    job = batch.start("steps=50", "seconds=0.1")
    batch.until("step 2\n")
    (batch.folder / "job_state").write_text(state)
    job.send_signal(signal.SIGTERM)
    for pid in (batch.folder / "pids").read_text().split():
        os.kill(int(pid), signal.SIGTERM)
    assert job.wait(30) == 75
    assert batch.state()["saves"] == 1
    assert len(batch.calls("scontrol requeue")) == requeued


def test_requeue_of_an_array_is_that_of_its_task(batch):
    array = {"SLURM_ARRAY_JOB_ID": "900000", "SLURM_ARRAY_TASK_ID": "2", "SLURM_JOB_ID": "900000"}
    job = batch.start("steps=50", "seconds=0.1", "note=%a", **array)
    batch.until("step 2\n")
    job.send_signal(signal.SIGUSR1)
    assert job.wait(30) == 75
    assert batch.calls("scontrol requeue") == ["scontrol requeue 900000_2"]
    assert set(batch.calls("scancel")) == {"scancel --signal=USR1 900000_2"}
    assert "note=2" in (batch.folder / "srun").read_text()


def test_failure_is_not_requeued(batch):
    """SL-03, SL-04: its code reaches Slurm, not that of the ranks that were ended for it."""
    code, said = batch.run("steps=50", "seconds=0.05", "fail=2:3:9")
    assert code == 9 and not batch.calls("scontrol requeue")
    assert said.splitlines()[-2].startswith("rank 2 on ")


def test_restarts_are_limited(batch):
    job = batch.start("steps=50", "seconds=0.1", SLURM_RESTART_COUNT="3", RL_MAX_RESTARTS="3")
    batch.until("step 2\n")
    job.send_signal(signal.SIGUSR1)
    assert job.wait(30) == 75
    assert not batch.calls("scontrol requeue")
    assert "restarted 3 times already (RL_MAX_RESTARTS = 3)" in batch.said


def test_end_of_the_allocation_is_passed_on(batch):
    assert batch.run("steps=1", "seconds=0")[0] == 0
    ends = {rank["SLURM_JOB_END_TIME"] for rank in batch.ranks()}
    expected = subprocess.run(
        ["date", "-d", "2030-01-01T00:00:00", "+%s"], capture_output=True, text=True, check=True
    )
    assert ends == {expected.stdout.strip()}
