"""A process that does not come further is ended, one that does is left alone."""

import subprocess
import sys
import textwrap
import time

import pytest

from rl_megatron.parallel import watchdog


@pytest.fixture
def found():
    seconds = []
    yield seconds
    watchdog.stop()


def test_a_hang_is_found_once_in_bounded_time(found):
    watchdog.start(0.1, found.append)
    deadline = time.monotonic() + 5
    while not found and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(found) == 1 and 0.1 < found[0] < 5


def test_work_that_gets_done_is_no_hang(found):
    watchdog.start(0.3, found.append)
    for _ in range(20):
        time.sleep(0.03)
        watchdog.beat()
    watchdog.stop()
    watchdog.beat()
    assert found == []


def test_code_that_never_gives_the_lock_back_is_ended_too():
    code = """
        import ctypes, time
        from rl_megatron.parallel import watchdog
        watchdog.start(0.2, lambda seconds: None)
        time.sleep(0.1)
        ctypes.PyDLL(None).sleep(60)  # Holds the lock, unlike time.sleep.
    """
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
    )
    assert time.monotonic() - began < 30
    assert done.returncode == 1 and "Timeout" in done.stderr
