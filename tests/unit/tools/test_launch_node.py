"""The launcher of a task: ranks, signals, exit codes, and who is heard last."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests.helpers.pool import ROOT, free_port

# What a rank does is an expression of its rank; `sleep` is long beside any test.
RANK = """
import os, signal, sys, time
def say(text):
    os.write(1, (text + "\\n").encode())
rank = int(os.environ["RANK"])
exec(sys.argv[1])
"""
# As main(), but ranks that lose a peer are given less time.
LAUNCHER = "import sys, tools.launch_node as l; l._GRACE_SECONDS = 0.3; sys.exit(l.main())"


@pytest.fixture
def start(tmp_path):
    """`start(what ranks do, ...)`: the launcher's process, with two ranks."""
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "state").mkdir()
    started = []

    def call(does, *options, port=None):
        command = [sys.executable, "-c", LAUNCHER, "--world-size=2", "--num-ranks=2", *options]
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "RL_STATE_FOLDER": str(tmp_path / "state"),
            "MASTER_ADDR": "node1",
            "MASTER_PORT": str(port or free_port()),
        }
        process = subprocess.Popen(
            [*command, str(tmp_path / "rank.py"), does],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield call
    for process in started:
        process.kill()


def failures(tmp_path):
    """Code and text of what ranks left, the first one first."""
    paths = sorted((tmp_path / "state").glob("failure_*"))
    return [(int(path.name.rpartition("_")[2]), path.read_text()) for path in paths]


def test_each_rank_knows_its_place(start):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    does = f"import json; say(json.dumps([os.environ[n] for n in {names}]))"
    out, _ = start(does, "--world-size=8", "--first-rank=4", "--ranks-per-node=4").communicate()
    rows = sorted(json.loads(line) for line in out.splitlines())
    assert rows == [["4", "8", "0", "4", "node1"], ["5", "8", "1", "4", "node1"]]


@pytest.mark.parametrize(
    ("does", "code"),
    [
        ("sys.exit(0)", 0),
        ("sys.exit(75)", 75),
        ("sys.exit(75 if rank else 0)", 75),
        ("sys.exit(7 if rank else 75)", 7),
        ("sys.exit(2)", 2),
    ],
)
def test_exit_code(start, tmp_path, does, code):
    assert start(does).wait(30) == code
    assert (tmp_path / "state/requeue").exists() == (code == 75)
    assert bool(failures(tmp_path)) == (code in (2, 7))


def test_first_failure_is_told_from_what_follows(start, tmp_path):
    """Rank 1 says what is wrong and takes its time to end; rank 0 ends before it, because of it."""
    does = (
        "time.sleep(0.2 - 0.2 * rank)\n"
        "print('Traceback (most recent call last)\\n', rank, file=sys.stderr, flush=True)\n"
        "time.sleep(0.4 * rank)\n"
        "os._exit(3 + rank)"
    )
    assert start(does).wait(30) == 4
    assert [code for code, _ in failures(tmp_path)] == [4, 3]


def test_dead_rank_ends_the_others(start, tmp_path):
    """SL-03: a rank killed for want of memory, the other asleep."""
    begun = time.monotonic()
    process = start("os.kill(os.getpid(), signal.SIGKILL) if rank else time.sleep(600)")
    assert process.wait(30) == 137 and time.monotonic() - begun < 10
    ((code, text),) = failures(tmp_path)
    assert code == 137 and text.startswith("rank 1 on ") and "was killed by SIGKILL" in text


def test_traceback_comes_last(start, tmp_path):
    does = "print('before', file=sys.stderr)\nif rank: raise ValueError('the fault')\ntime.sleep(9)"
    assert start(does).wait(30) == 1
    lines = failures(tmp_path)[0][1].splitlines()
    assert lines[0].startswith("Traceback") and lines[-2] == "ValueError: the fault"
    assert lines[-1].startswith("rank 1 on ") and lines[-1].endswith("ended with exit code 1")


def test_mistake_is_explained_by_rank_0(start, tmp_path):
    start(
        "print(f'said by {rank}', file=sys.stderr); time.sleep(0.2 - 0.2 * rank); sys.exit(2)"
    ).wait()
    assert "said by 0" in failures(tmp_path)[0][1]


def test_silent_failure_lets_others_speak(start):
    """Slurm ends the other tasks with this one, and theirs may be the rank that says why."""
    begun = time.monotonic()
    assert start("sys.exit(2)", "--world-size=4", "--first-rank=2").wait(30) == 2
    assert time.monotonic() - begun > 0.3


WAITS = (
    "got = []\n"
    "for s in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):\n"
    "    signal.signal(s, lambda number, _: got.append(number))\n"
    "say('ready')\n"
    "while not got: time.sleep(0.02)\n"
    "time.sleep(0.2)\n"
    "os._exit(75 if len(got) == 1 else 9)"
)


@pytest.mark.parametrize("signum", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM])
def test_signals_reach_every_rank(start, signum):
    process = start(WAITS)
    assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    process.send_signal(signum)
    assert process.wait(30) == 75


def test_signal_to_ranks_that_only_start(start):
    """It comes before their handlers are up, and must not kill them."""
    process = start("say('ready'); time.sleep(0.3); sys.exit(0)")
    process.stdout.readline()
    process.send_signal(signal.SIGUSR1)
    assert process.wait(30) == 0


def test_what_may_be_ended_at_any_time(start):
    process = start("say('ready'); time.sleep(600)", "--restartable")
    assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    process.send_signal(signal.SIGUSR1)
    assert process.wait(10) == 75


def test_failure_elsewhere_ends_ranks_at_once(start, tmp_path):
    """Slurm ends the step of a rank that failed on another node; ours would wait for it."""
    process = start("signal.signal(15, signal.SIG_IGN); say('1'); time.sleep(600)")
    process.stdout.readline()
    (tmp_path / "state/failure_1_rank_9_code_3").touch()
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 137
    assert len(failures(tmp_path)) == 1  # nothing of ours


def test_taken_port(start):
    """SL-06."""
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        process = start("sys.exit(0)", port=port)
        _, said = process.communicate(timeout=30)
    assert process.returncode == 1
    assert f"MASTER_PORT = {port} on node1 is taken" in said and "set MASTER_PORT" in said
