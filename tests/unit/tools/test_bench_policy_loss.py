import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from tools.bench.policy_loss import measure_all  # noqa: E402

ROOT = Path(__file__).parents[3]


def test_both_ways_are_counted():
    rows = {(row.name, row.way): row for row in measure_all(2048, torch.device("cpu"))}
    assert {way for _, way in rows} == {"torch", "kernel"} and len(rows) == 8
    for (name, way), row in rows.items():
        if way == "kernel":
            assert row.launches == 3 and row.milliseconds is None
            # 32 and, for the product with what comes from above, 16; a little for blocks and sums.
            assert row.bytes_per_token < (50 if name.startswith("grpo") else 22)
        else:
            assert row.launches > 50 and row.milliseconds > 0


def test_without_a_gpu_there_is_one_clear_line(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    command = [sys.executable, "tools/bench/gpu_check.py", "--json", str(tmp_path / "rows.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 1)
    assert "no CUDA device" in done.stdout


def test_json_has_a_row_per_way(tmp_path):
    file = tmp_path / "rows.json"
    command = [
        sys.executable,
        "tools/bench/policy_loss.py",
        "--tokens",
        "1024",
        "--json",
        str(file),
    ]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    rows = json.loads(file.read_text())
    assert len(rows) == 8 and rows[0]["tokens"] == 1024
