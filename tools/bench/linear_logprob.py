"""Log-probs and entropy from hidden states: ours, other libraries' and the bare matrix products.

    python tools/bench/linear_logprob.py [--dtype bfloat16] [--minutes 5] [--json FILE]

Each row runs in a process of its own. Time is a ratio to the matrix products that the work is made
of, run in turn with it: one for a forward pass, four for a forward and backward pass (a pass that
keeps logits, or knows its gradients at once, needs three of them). On a CPU both are CPU time with
threads that sleep while they wait, so that others on the machine do not count, and the products are
those of the dtype or of float32, whichever is faster here. On a GPU it is time on the device. Peak
is what is held at once above the inputs and, in a backward pass, the gradients of hidden states and
head. Errors are the largest of 64 rows against float64, in nats. Those without an entropy error
compute none, nor its gradient.

All rows share --minutes, those with more products more of it. A row that would take longer is
measured fewer times, and if that is not enough with fewer tokens, half as many again and again but
not below 128: the bare products of its dtype tell which (half precision is slow on many CPUs). The
products beside it are then of as many tokens, and so is its peak. Rows of ours that `auto` takes
always have all tokens. The table and the JSON say how many tokens and runs a row is made of.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib.util
import json
import math
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from rl_megatron.kernels.linear_logprob.reference import plain_logprob  # noqa: E402
from tools.bench.logprob_table import Row, Size, markdown, table  # noqa: E402
from tools.bench.logprob_ways import MODES, WAYS, Problem, Way  # noqa: E402

CHECKED_ROWS = 64
LEAST_TOKENS = 128
# What a row costs at least, in passes of bare products: two of its own, with what is beside their
# products, and one of them. Compiling comes on top.
PASSES = 3.6


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
    parser.add_argument("--repeats", type=int, default=3, help="at most, of each row")
    parser.add_argument("--minutes", type=float, default=5.0, help="for all rows together")
    parser.add_argument("--only", nargs="+", help=f"some of: {', '.join(WAYS)}")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", action="store_true", help="the README's table at the end")
    args = parser.parse_args()
    os.environ["OMP_WAIT_POLICY"] = "passive"  # For the processes that measure.
    # Processes of torch.compile's own would be left behind by them.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    deadline = time.perf_counter() + 60 * args.minutes
    chosen = selected(args.only)
    shares = [MODES[mode] if is_installed(name) else 0 for name, mode in chosen]
    to_come = len(args.dtype) * sum(shares)
    rows = []
    for dtype in args.dtype:
        size = Size(args.tokens, args.hidden, args.vocab, dtype, args.threads, args.repeats)
        of_dtype = []
        for (name, mode), share in zip(chosen, shares, strict=True):
            left = max(0.0, deadline - time.perf_counter())
            of_dtype.append(measured(name, mode, size, left * share / max(to_come, 1)))
            to_come -= share
        # Wider than a pipe is taken to be: no number is to be cut.
        Console(width=max(120, Console().width)).print(table(size, of_dtype))
        rows += of_dtype
    if args.markdown:
        print(markdown(rows))
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


def measured(name: str, mode: str, size: Size, limit: float = math.inf) -> Row:
    """The row of one way and mode in about `limit` seconds, from a fresh process."""
    if not is_installed(name):
        return Row(name, size.dtype, mode, note="not installed (pip install -e .[bench])")
    # Forked from one that has done nothing but import torch, which takes as long as a pass.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    with context.Pool(1) as pool:
        return pool.apply(measure, (name, mode, size, limit))


def is_installed(name: str) -> bool:
    """Whether this way can be measured here."""
    package = WAYS[name].package
    return package is None or importlib.util.find_spec(package) is not None


def measure(name: str, mode: str, size: Size, limit: float = math.inf) -> Row:
    """Memory first, before the bound has made all logits; then time; then errors."""
    end = time.perf_counter() + limit
    torch.set_num_threads(size.threads)
    way = WAYS[name]
    size = replace(size, tokens=affordable_tokens(way, mode, size, limit))
    problem = make_problem(size)
    run = way.make(problem, mode)
    run()  # Whatever is loaded and compiled on first use.
    problem.drop_gradients()
    first: list[float] = []
    device = problem.hidden.device
    peak = peak_bytes(lambda: first.append(seconds(run, device)), device)
    peak -= way.kept_bytes(problem, mode)
    problem.drop_gradients()
    ratio, repeats = time_ratio(run, problem, mode, size.repeats, first[0], end)
    logprob_error, entropy_error = errors(way, problem)
    return Row(
        name, size.dtype, mode, ratio, peak / 2**20, logprob_error, entropy_error,
        size.tokens, repeats,
    )  # fmt: skip


def affordable_tokens(way: Way, mode: str, size: Size, limit: float) -> int:
    """How many tokens `limit` seconds are enough for, going by bare products of a part."""
    if way.whole:
        return size.tokens
    vocab = min(size.vocab, 4096)
    part = make_problem(replace(size, tokens=min(size.tokens, LEAST_TOKENS), vocab=vocab))
    dtype = part.hidden.dtype if way.own_dtype else fastest_dtype(part)
    work = make_products(part, dtype, 1)
    work()
    start = time.perf_counter()
    work()
    per_token = (time.perf_counter() - start) / len(part.hidden) * size.vocab / vocab
    tokens = size.tokens
    while tokens > LEAST_TOKENS and PASSES * MODES[mode] * per_token * tokens > limit:
        tokens = max(LEAST_TOKENS, tokens // 2)
    return tokens


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


def time_ratio(
    run: Callable[[], object], problem: Problem, mode: str, repeats: int, first: float, end: float
) -> tuple[float, int]:
    """Least time of `run` over the least of the bound, taken in turn, and how often each was.

    `first` is a time of `run` already. There are no more than `repeats`, and none that would not
    be done by `end`.
    """
    device = problem.hidden.device
    bound = make_products(problem, fastest_dtype(problem), MODES[mode])
    start = time.perf_counter()
    least, least_of_bound = first, seconds(bound, device)
    round_seconds = time.perf_counter() - start
    done = 1
    while done < repeats and time.perf_counter() + round_seconds < end:
        start = time.perf_counter()
        problem.drop_gradients()
        least = min(least, seconds(run, device))
        problem.drop_gradients()
        least_of_bound = min(least_of_bound, seconds(bound, device))
        round_seconds = time.perf_counter() - start
        done += 1
    return least / least_of_bound, done


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


if __name__ == "__main__":
    main()
