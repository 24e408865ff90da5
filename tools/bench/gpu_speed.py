"""Times and memory of the kernels, each beside the bound that the device itself sets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_megatron.kernels.linear_logprob import linear_logprob
from rl_megatron.kernels.linear_logprob.tiles import tiles_for
from rl_megatron.kernels.linear_logprob.triton_rows import TritonRows
from tools.bench.gpu_errors import Finding
from tools.bench.policy_loss import measure_all

MIB = 2**20


@dataclass(frozen=True)
class Sizes:
    """Of the head that is timed: rows, width of a row, vocabulary."""

    tokens: int
    hidden: int
    vocab: int


def seconds_of(run: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """The best of several runs, the first of which is not counted."""
    run()
    best = float("inf")
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        run()
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best


def synchronize(device: torch.device) -> None:
    """Wait for what was started on `device`."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def row_speed(device: torch.device, sizes: Sizes) -> Iterator[Finding]:
    """Row kernels on one tile of the head, as bytes per second beside those of a copy."""
    tiles = tiles_for(device)
    num_rows, width = min(tiles.rows, sizes.tokens), min(tiles.columns, sizes.vocab)
    logits = torch.randn(num_rows, width, device=device)
    other = torch.empty_like(logits)
    column = torch.zeros(num_rows, dtype=torch.int64, device=device)
    one = torch.ones(num_rows, device=device)
    rows = TritonRows()
    copied = 8 * logits.numel() / seconds_of(lambda: other.copy_(logits), device, 20)
    yield Finding("copy of a tile", copied / 1e9, "GB/s")

    def statistics() -> object:
        return rows.statistics(logits, column, one, None)

    def gradient() -> object:
        return rows.gradient(logits, column, one, None, one, one, one, one, one, torch.bfloat16)

    for name, run, bytes_per_logit in (("statistics", statistics, 4), ("gradient", gradient, 6)):
        rate = bytes_per_logit * logits.numel() / seconds_of(run, device, 20)
        yield Finding(f"{name} kernel", rate / 1e9, "GB/s")
        yield Finding(f"{name} kernel against a copy", rate / copied, "ratio")


def head_speed(device: torch.device, sizes: Sizes) -> Iterator[Finding]:
    """The head in bf16, forward and both ways, beside its one and its four matrix products."""
    hidden = torch.randn(sizes.tokens, sizes.hidden, device=device).bfloat16().requires_grad_()
    weight = 0.02 * torch.randn(sizes.vocab, sizes.hidden, device=device)
    weight = weight.bfloat16().requires_grad_()
    targets = torch.randint(sizes.vocab, (sizes.tokens,), device=device)

    def forward() -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            return linear_logprob(
                hidden, weight, targets, 1.0, sizes.vocab, implementation="triton"
            )

    def both() -> None:
        hidden.grad = weight.grad = None
        logprob, entropy = linear_logprob(
            hidden, weight, targets, 1.0, sizes.vocab, implementation="triton"
        )
        (logprob.sum() + 0.01 * entropy.sum()).backward()

    one, four = product_seconds(hidden.detach(), weight.detach(), device)
    flops = 2 * sizes.tokens * sizes.hidden * sizes.vocab
    for name, run, bound, num_products in (
        ("head forward", forward, one, 1),
        ("head forward + backward", both, four, 4),
    ):
        seconds = seconds_of(run, device)
        yield Finding(name, 1000 * seconds, "ms")
        yield Finding(
            f"{name}, of {num_products} products", flops * num_products / seconds / 1e12, "TFLOP/s"
        )
        yield Finding(f"{name} against {num_products} products", seconds / bound, "ratio")
        if device.type == "cuda":
            yield Finding(f"{name}, peak memory", peak_mib(run), "MiB above inputs")


def product_seconds(hidden: Tensor, weight: Tensor, device: torch.device) -> tuple[float, float]:
    """Seconds of the forward product, and of it twice with both of the backward pass.

    In slices of rows whose logits would fit, so that no more is held than the head itself holds.
    """
    cut = min(len(hidden), 4096)
    some = hidden[:cut]
    share = len(hidden) / cut
    dlogits = torch.ones(cut, len(weight), dtype=hidden.dtype, device=device)
    forward = share * seconds_of(lambda: some @ weight.t(), device)
    to_hidden = share * seconds_of(lambda: dlogits @ weight, device)
    to_weight = share * seconds_of(lambda: dlogits.t() @ some, device)
    return forward, 2 * forward + to_hidden + to_weight


def peak_mib(run: Callable[[], object]) -> float:
    """MiB that a run holds at most, beyond what was held before."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    return (torch.cuda.max_memory_allocated() - before) / MIB


def loss_speed(device: torch.device, sizes: Sizes) -> Iterator[Finding]:
    """The losses, plain and fused; see tools/bench/policy_loss.py for launches and bytes."""
    for row in measure_all(max(sizes.tokens, 1024), device):
        if row.milliseconds is not None:
            yield Finding(f"{row.name}, {row.way}", row.milliseconds, "ms")
