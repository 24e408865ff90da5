import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from rl_megatron.errors import RolloutError
from rl_megatron.rewards import math_pool
from rl_megatron.rewards.math_pool import MathPool, shared_pool

EASY = (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}")
ENDLESS = "9^{9^{9^{9}}}"


@pytest.fixture
def pool():
    pool = MathPool(1)
    yield pool
    pool.close()


def workers():
    return {child.pid for child in psutil.Process().children() if "math_worker" in cmd(child)}


def cmd(process):
    return " ".join(process.cmdline())


def test_an_answer_that_never_ends_costs_its_deadline_and_a_worker(pool, caplog):
    before = workers()
    assert pool.equal([EASY], 20.0) == [True]
    (first,) = workers() - before
    started = time.monotonic()
    hostile = [(EASY[0], ENDLESS), (EASY[0], "10^{100000000}"), (EASY[0], "(" * 500 + ")" * 500)]
    assert pool.equal(hostile, 0.2) == [False] * 3
    assert time.monotonic() - started < 30
    assert "within 0.2 s of CPU time" in caplog.text
    assert first not in workers()
    assert pool.equal([EASY], 20.0) == [True]


def test_a_worker_that_was_killed_from_outside_is_replaced(pool):
    before = workers()
    assert pool.equal([EASY], 20.0) == [True]
    (worker,) = workers() - before
    psutil.Process(worker).kill()
    time.sleep(0.1)
    assert pool.equal([EASY], 20.0) == [True]


def test_what_slurm_sends_to_all_processes_ends_no_worker(pool):
    """A worker lost to it would make a right answer a wrong one, and the resumed run another."""
    before = workers()
    assert pool.equal([EASY], 20.0) == [True]
    (worker,) = workers() - before
    for signum in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
        os.kill(worker, signum)
    assert pool.equal([EASY] * 2, 20.0) == [True] * 2
    assert workers() - before == {worker}
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()


def test_close_ends_every_worker():
    before = workers()
    pool = MathPool(1)
    pool.equal([EASY], 20.0)
    assert len(workers() - before) == 1
    pool.close()
    assert workers() <= before


def test_works_off_the_main_thread():
    found = []
    thread = threading.Thread(target=lambda: found.extend(shared_pool().equal([EASY], 20.0)))
    thread.start()
    thread.join()
    assert found == [True]


def test_a_worker_that_cannot_start_says_so(monkeypatch, tmp_path):
    program = tmp_path / "worker.py"
    program.write_text("raise SystemExit(3)")
    monkeypatch.setattr(math_pool, "_PROGRAM", program)
    pool = MathPool(1)
    with pytest.raises(RolloutError, match="exit code 3.*install math-verify"):
        pool.equal([EASY], 20.0)
    pool.close()


def test_no_worker_outlives_a_script_without_a_main_guard(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from rl_megatron.rewards.math_pool import shared_pool\n"
        "import psutil, sys\n"
        f"assert shared_pool().equal([{EASY!r}], 20.0) == [True]\n"
        "assert 'torch' not in sys.modules and 'sympy' not in sys.modules\n"
        "sys.stdout.write(str(psutil.Process().children()[0].pid))\n"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(script)], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not psutil.pid_exists(int(done.stdout))
