import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

import rl_megatron.kernels as kernels  # noqa: E402
from rl_megatron.kernels.launch import Launch  # noqa: E402
from tools.aot_compile import TARGETS, compile_launch  # noqa: E402
from tools.aot_kernels import report  # noqa: E402
from tools.aot_variants import variants  # noqa: E402

ROOT = Path(__file__).parents[3]


@triton.jit
def hoarding_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):  # noqa: N803
    """Keeps a block in the registers of one warp from its maximum to its sum."""
    x = tl.load(x_ptr + tl.arange(0, BLOCK))
    tl.store(out_ptr, tl.sum(tl.exp(x - tl.max(x, 0)), 0))


@triton.jit
def product_kernel(a_ptr, b_ptr, out_ptr, size, BLOCK: tl.constexpr):  # noqa: N803
    """A product of matrices whose tiles wait in shared memory."""
    index = tl.arange(0, BLOCK)
    tile = index[:, None] * size + index[None, :]
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    for first in range(0, size, BLOCK):
        a, b = tl.load(a_ptr + first + tile), tl.load(b_ptr + first * size + tile)
        total = tl.dot(a, b, total)
    tl.store(out_ptr + tile, total)


def hoarding(block, **settings):
    x = torch.zeros(block)
    return Launch(hoarding_kernel, (x, x), {"BLOCK": block, "num_warps": 1, **settings})


def product(num_stages):
    a = torch.zeros(1, dtype=torch.bfloat16)
    settings = {"BLOCK": 128, "num_warps": 8, "num_stages": num_stages}
    return Launch(product_kernel, (a, a, torch.zeros(1), 1024), settings)


# AMD gives a thread twice the registers, unless eight warps are to share them.
@pytest.mark.parametrize(("target", "settings"), [("sm_90", {}), ("gfx942", {"waves_per_eu": 8})])
def test_a_kernel_that_spills_is_caught(target, settings, capsys):
    good = compile_launch("small", hoarding(1024, **settings), target)
    bad = compile_launch("hoarder", hoarding(8192, **settings), target)
    assert good.spills == 0 and not good.faults()
    assert bad.spills > 0
    assert report([good, bad]) == 1
    shown = capsys.readouterr().out
    assert f"hoarder on {target}: {bad.spills} spills; take a smaller block" in shown
    assert report([good]) == 0


def test_shared_memory_that_does_not_fit_is_caught():
    good, bad = (compile_launch("product", product(stages), "sm_90") for stages in (2, 8))
    assert good.tensor_core > 0 and not good.faults()
    limit = TARGETS["sm_90"].shared_bytes
    assert good.shared_bytes <= limit == 232448 < bad.shared_bytes
    assert "bytes of shared memory, at most 232448" in bad.faults()[0]
    assert not replace(bad, shared_bytes=limit).faults()


def test_every_kernel_is_among_the_variants():
    kept = {launch.kernel.__name__ for launch in variants().values()}
    written = set()
    for file in Path(kernels.__path__[0]).rglob("*.py"):
        lines = file.read_text().splitlines()
        written |= {x.split("(")[0].removeprefix("def ") for x in lines if x.startswith("def ")}
    written = {name for name in written if name.endswith("_kernel")}
    assert kept == written and len(kept) >= 7


def test_row_kernels_load_wide_and_nothing_spills(tmp_path):
    # All targets of all kernels are `make check-kernels`.
    command = [sys.executable, "tools/aot_kernels.py", "--targets", "sm_90", "--jobs", "1"]
    command += ["--kernels", "statistics_kernel", "--json", str(tmp_path / "rows.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["kernel"]: row for row in json.loads((tmp_path / "rows.json").read_text())}
    assert len(rows) == 4 and all(row["spills"] == 0 for row in rows.values())
    assert rows["statistics_kernel"]["load_bits"] == 128
    assert "No kernel uses tensor cores" in done.stdout and "registers" in done.stdout
