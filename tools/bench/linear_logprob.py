"""Log-probs and entropy from hidden states: ours, other libraries' and the bare matrix products.

    python tools/bench/linear_logprob.py [--dtype bfloat16] [--tokens 2048] [--json FILE]

Each row runs in a process of its own. Time is a ratio to the matrix products that the work is made
of, run in turn with it: one for a forward pass, four for a forward and backward pass (a pass that
keeps logits, or knows its gradients at once, needs three of them). On a CPU both are CPU time with
threads that sleep while they wait, so that others on the machine do not count, and the products are
those of the dtype or of float32, whichever is faster here. On a GPU it is time on the device. Peak
is what is held at once above the inputs and, in a backward pass, the gradients of hidden states and
head. Errors are the largest of 64 rows against float64, in nats. Those without an entropy error
compute none, nor its gradient.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib.util
import json
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from rl_megatron.kernels.linear_logprob.reference import plain_logprob  # noqa: E402
from tools.bench.logprob_ways import MODES, WAYS, Problem, Way  # noqa: E402

CHECKED_ROWS = 64


@dataclass(frozen=True)
class Size:
    """What is measured."""

    tokens: int
    hidden: int
    vocab: int
    dtype: str
    threads: int
    repeats: int


@dataclass(frozen=True)
class Row:
    """A line of the table; see the module."""

    name: str
    dtype: str
    mode: str
    ratio_to_gemm: float | None = None
    peak_mib: float | None = None
    logprob_error: float | None = None
    entropy_error: float | None = None
    note: str = ""


def main() -> None:
    """Measure every way in every mode it has, print a table, write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="+", help=f"some of: {', '.join(WAYS)}")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    os.environ["OMP_WAIT_POLICY"] = "passive"  # For the processes that measure.
    rows = []
    for dtype in args.dtype:
        size = Size(args.tokens, args.hidden, args.vocab, dtype, args.threads, args.repeats)
        ours = [measured(name, mode, size) for name, mode in selected(args.only)]
        Console().print(table(size, ours))
        rows += ours
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def selected(only: list[str] | None) -> list[tuple[str, str]]:
    """Names and modes of what is measured on this machine."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return [
        (name, mode)
        for name, way in WAYS.items()
        if (only is None or name in only) and device in way.devices
        for mode in way.modes
    ]


def measured(name: str, mode: str, size: Size) -> Row:
    """The row of one way and mode, from a fresh process."""
    package = WAYS[name].package
    if package is not None and importlib.util.find_spec(package) is None:
        return Row(name, size.dtype, mode, note="not installed (pip install -e .[bench])")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, (name, mode, size))


def measure(name: str, mode: str, size: Size) -> Row:
    """Memory first, before the bound has made all logits; then time; then errors."""
    torch.set_num_threads(size.threads)
    way, problem = WAYS[name], make_problem(size)
    run = way.make(problem, mode)
    run()  # Whatever is loaded and compiled on first use.
    problem.drop_gradients()
    peak = peak_bytes(run, problem.hidden.device) - way.kept_bytes(problem, mode)
    problem.drop_gradients()
    ratio = time_ratio(run, problem, mode, size.repeats)
    logprob_error, entropy_error = errors(way, problem)
    return Row(name, size.dtype, mode, ratio, peak / 2**20, logprob_error, entropy_error)


def make_problem(size: Size) -> Problem:
    """Hidden states and a head whose logits are spread like a trained model's, in one dtype."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, size.dtype)
    torch.manual_seed(0)
    hidden = torch.randn(size.tokens, size.hidden, device=device).to(dtype)
    head = torch.empty(size.vocab, size.hidden, device=device, dtype=dtype)
    for part in head.split(4096):
        part.copy_(torch.randn(part.shape, device=device) * 2 * size.hidden**-0.5)
    targets = torch.randint(size.vocab, (size.tokens,), device=device)
    gradients = torch.randn(2, size.tokens, device=device)
    return Problem(hidden.requires_grad_(), head.requires_grad_(), targets, gradients)


def time_ratio(run: Callable[[], object], problem: Problem, mode: str, repeats: int) -> float:
    """Least time of `run` over the least of the bound, taken in turn."""
    bound = make_products(problem, fastest_dtype(problem), MODES[mode])
    best = [float("inf"), float("inf")]
    for _ in range(repeats):
        for place, work in enumerate((run, bound)):
            problem.drop_gradients()
            best[place] = min(best[place], seconds(work, problem.hidden.device))
    return best[0] / best[1]


def fastest_dtype(problem: Problem) -> torch.dtype:
    """That of the problem, or on a CPU float32 if a product of a part of it is faster so."""
    dtype, device = problem.hidden.dtype, problem.hidden.device
    if device.type != "cpu" or dtype == torch.float32:
        return dtype
    part = Problem(problem.hidden[:512], problem.head[:4096], problem.targets[:512], None)
    times = {}
    for tried in (dtype, torch.float32):
        work = make_products(part, tried, 1)
        work()
        times[tried] = min(seconds(work, device) for _ in range(3))
    return min(times, key=times.__getitem__)


def make_products(problem: Problem, dtype: torch.dtype, num_products: int) -> Callable[[], object]:
    """One product, or all of a forward and backward pass with logits computed twice."""
    hidden, head = (x.detach().to(dtype) for x in (problem.hidden, problem.head))
    logits = torch.zeros(len(hidden), len(head), dtype=dtype, device=hidden.device)
    d_hidden, d_head = torch.zeros_like(hidden), torch.zeros_like(head)

    def products() -> None:
        torch.mm(hidden, head.t(), out=logits)
        if num_products == 4:
            torch.mm(hidden, head.t(), out=logits)
            torch.mm(logits, head, out=d_hidden)
            torch.mm(logits.t(), hidden, out=d_head)

    return products


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """CPU seconds of all threads of this process, or seconds of the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        return time.perf_counter() - start
    before = resource.getrusage(resource.RUSAGE_SELF)
    work()
    after = resource.getrusage(resource.RUSAGE_SELF)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """The most that is held at once during `run` above what is held before, its result included."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    ctypes.CDLL(None).malloc_trim(0)  # What was freed may still be held for the next to ask.
    Path("/proc/self/clear_refs").write_text("5")  # The peak starts anew.
    before = status_bytes("VmRSS")
    run()
    return status_bytes("VmHWM") - before


def status_bytes(key: str) -> int:
    """A line of Linux's account of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))


def errors(way: Way, problem: Problem) -> tuple[float, float | None]:
    """Largest errors of log-prob and entropy in nats."""
    some = slice(0, CHECKED_ROWS)
    few = Problem(problem.hidden[some].detach(), problem.head.detach(), problem.targets[some], None)
    with torch.no_grad():
        logprob, entropy = way.values(few)
        exact = plain_logprob(
            few.hidden, few.head, few.targets, 1.0, len(few.head), dtype=torch.float64
        )
    off = [
        None if v is None else largest(v, want)
        for v, want in zip((logprob, entropy), exact, strict=True)
    ]
    assert off[0] is not None
    return off[0], off[1]


def largest(value: Tensor, exact: Tensor) -> float:
    """The largest difference."""
    return float((value.double() - exact).abs().max())


def table(size: Size, rows: list[Row]) -> Table:
    """The rows, to be printed."""
    where = (
        torch.cuda.get_device_name() if torch.cuda.is_available() else f"{size.threads} CPU threads"
    )
    what = f"{size.tokens} tokens, hidden size {size.hidden}, vocabulary {size.vocab}"
    title = f"{what}, {size.dtype}, {where}"
    shown = Table(title=title, box=SIMPLE)
    for column in ("way", "mode", "time / products", "peak MiB", "log-prob error", "entropy error"):
        shown.add_column(column, justify="left" if column in ("way", "mode") else "right")
    for row in rows:
        if row.note:
            shown.add_row(row.name, row.mode, row.note)
            continue
        formats = ("{:.2f}", "{:.0f}", "{:.1e}", "{:.1e}")
        values = (row.ratio_to_gemm, row.peak_mib, row.logprob_error, row.entropy_error)
        cells = ("-" if v is None else f.format(v) for f, v in zip(formats, values, strict=True))
        shown.add_row(row.name, row.mode, *cells)
    return shown


if __name__ == "__main__":
    main()
