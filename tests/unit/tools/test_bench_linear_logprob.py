"""The bench of log-probs: every way computes log-probs, and ratios are to the right products."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from rl_megatron import kernels
from tools.bench import linear_logprob
from tools.bench.linear_logprob import make_problem, make_products, measured, selected
from tools.bench.logprob_table import MARKDOWN_HEADER, Row, Size, markdown, table
from tools.bench.logprob_ways import WAYS

SMALL = Size(tokens=96, hidden=32, vocab=700, dtype="float32", threads=1, repeats=1)
# What needs no compilation of seconds and is always there.
QUICK = ("ours: cpu", "ours: torch", "plain torch", "torch linear_cross_entropy")


@pytest.mark.parametrize("name", [name for name in QUICK if name in WAYS])
def test_a_way_computes_what_it_is_measured_for(name):
    for mode in WAYS[name].modes:
        row = linear_logprob.measure(name, mode, SMALL)
        assert row.note == "" and row.ratio_to_gemm > 0
        assert row.logprob_error < 1e-5
        assert row.entropy_error is None or row.entropy_error < 1e-5


def shown(rows):
    console = Console(record=True, width=200, file=io.StringIO())
    console.print(rows)
    return console.export_text()


def test_modes_leave_the_same_gradients():
    problem = make_problem(SMALL)
    found = []
    for mode in ("two-pass", "one-pass"):
        problem.drop_gradients()
        WAYS["ours: cpu"].make(problem, mode)()
        found.append((problem.hidden.grad, problem.head.grad))
    problem.drop_gradients()
    WAYS["plain torch"].make(problem, "two-pass")()
    for gradients in found:
        torch.testing.assert_close(gradients[0], problem.hidden.grad, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(gradients[1], problem.head.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("count", [1, 4])
def test_the_bound_is_the_products_of_a_pass(count):
    products = make_products(make_problem(SMALL), torch.float32, count)
    with torch.profiler.profile() as seen:
        products()
    assert sum(event.count for event in seen.key_averages() if event.key == "aten::mm") == count


def test_a_row_without_time_is_measured_once_and_with_fewer_tokens():
    many = replace(SMALL, tokens=1024, repeats=3)
    row = linear_logprob.measure("plain torch", "two-pass", many, limit=0.0)
    assert (row.tokens, row.repeats) == (128, 1)
    row = linear_logprob.measure("plain torch", "two-pass", many, limit=60.0)
    assert (row.tokens, row.repeats) == (1024, 3)
    assert "1024 x 3" in shown(table(many, [row]))


def test_the_readme_has_the_table_that_the_bench_prints():
    rows = [
        Row("a", "float32", "forward", 1.0, 2.0, 3e-7, None, 128, 1),
        Row("a", "float32", "two-pass", 1.5, 20.4, 3e-7, None, 64, 1),
        Row("b", "float32", "forward", note="not installed"),
    ]
    header, _, line = markdown(rows).splitlines()
    assert line == "| a | float32 | 1.00 | 1.50 | - | 2, 20, - | 3.0e-07 | 128, 64 |"
    readme = Path(kernels.__file__).with_name("README.md").read_text()
    assert header == MARKDOWN_HEADER and header in readme


def test_what_is_not_installed_is_said(monkeypatch):
    monkeypatch.setattr(linear_logprob.importlib.util, "find_spec", lambda name: None)
    row = measured("Liger, selective", "forward", SMALL)
    assert "not installed" in row.note and row.ratio_to_gemm is None


def test_ways_of_a_gpu_are_left_out_on_a_cpu():
    assert ("ours: triton", "forward") not in selected(None) or torch.cuda.is_available()
    assert selected(["plain torch"]) == [("plain torch", "forward"), ("plain torch", "two-pass")]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is Linux's to tell")
@pytest.mark.parametrize(
    ("mode", "dtype", "most"),
    [
        ("forward", "float32", 30),
        ("two-pass", "float32", 30),
        # 1024 rows are kept, which are 64 MiB here.
        ("one-pass", "bfloat16", 90),
    ],
)
def test_the_fused_head_holds_no_more_for_more_tokens(mode, dtype, most):
    peaks = []
    for tokens in (2048, 4096):
        size = replace(SMALL, tokens=tokens, hidden=16, vocab=16384, dtype=dtype)
        peaks.append(measured("ours: cpu", mode, size).peak_mib)
    # All logits would be 128 MiB and 256 MiB. What grows is a few numbers a token and stretch; and
    # what the allocator keeps for itself differs by some 15 MiB from run to run.
    assert peaks[0] < most
    assert peaks[1] - peaks[0] < 40
