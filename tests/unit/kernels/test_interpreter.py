"""Runs the tests of the Triton kernels where Triton interprets instead of compiling."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
FOLDER = Path(__file__).parent / "interpreter"
ROOT = FOLDER.parents[3]


def test_kernels_under_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    # Else the inner run takes itself for a worker of the outer one.
    environment = {k: v for k, v in environment.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-6000:]}{done.stderr[-2000:]}"
    assert " passed" in done.stdout and "skipped" not in done.stdout
