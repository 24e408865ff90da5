"""Conversion and weights digest from their command lines, by python and by torchrun."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rl_megatron.checkpoint.digest import folder_digest
from tests.helpers.pool import ROOT
from tests.helpers.tiny_model import make_tiny_hf

CONVERT, DIGEST = "tools/convert_checkpoint.py", "tools/weights_digest.py"


def run(
    *words: str | Path, ranks: int = 1, tool: str = CONVERT
) -> subprocess.CompletedProcess[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    launcher = torchrun if ranks > 1 else []
    command = [sys.executable, *launcher, tool, *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    return make_tiny_hf(tmp_path_factory.mktemp("hf"), "qwen2", tie=True, dtype=torch.bfloat16)


def test_import_by_python_and_export_by_torchrun_give_the_same_files(hf, tmp_path):
    done = run("import", "--hf", hf, "--output", tmp_path / "megatron")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"wrote {tmp_path / 'megatron'}\n"
    moved = hf.rename(tmp_path / "moved")
    try:
        export = ("export", "--checkpoint", tmp_path / "megatron", "--output", tmp_path / "out")
        done = run(*export, "tensor_model_parallel_size=2", ranks=2)
    finally:
        moved.rename(hf)
    assert done.returncode == 0, done.stderr
    assert {p.name for p in (tmp_path / "out").iterdir()} == {p.name for p in hf.iterdir()}
    for file in hf.iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes(), file.name
    folders = (hf, tmp_path / "megatron", tmp_path / "out")
    done = run(*folders, "pipeline_model_parallel_size=2", tool=DIGEST, ranks=2)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[1] for line in lines] == [str(folder) for folder in folders]
    assert len({line[0] for line in lines}) == 1 and len(lines[0][0]) == 32


def test_the_digest_of_a_folder_that_is_not_there(hf, tmp_path):
    done = run(hf, tmp_path / "nowhere", tool=DIGEST)
    assert done.returncode == 2
    assert f"FOLDER {tmp_path / 'nowhere'} does not exist" in done.stderr
    assert done.stdout.split() == [folder_digest(hf), str(hf)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["import", "--hf", "nowhere"], "--hf nowhere does not exist"),
        (["import", "--hf", "HF", "tensor_model_parallel_size=2"], "must divide world size (1)"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(words, message, hf, tmp_path):
    words = [str(hf) if word == "HF" else word for word in words]
    done = run(*words, "--output", tmp_path / "out")
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
