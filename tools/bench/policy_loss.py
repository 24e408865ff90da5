"""Time, launches and traffic of the losses: plain torch against the Triton kernels.

    python tools/bench/policy_loss.py [--tokens 32768] [--json FILE]

Forward and backward, with all metrics. Launches are operations of torch that start a kernel on a
GPU; bytes are what they read and write. Without a GPU the kernels are counted and not timed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from rl_megatron.interfaces.batch import PackedBatch  # noqa: E402
from rl_megatron.interfaces.objective import ModelOutput, Objective, Totals  # noqa: E402
from rl_megatron.kernels.launch import recorded  # noqa: E402
from rl_megatron.kernels.policy_loss import PolicyLossSettings, policy_loss  # noqa: E402
from rl_megatron.kernels.preference_loss import (  # noqa: E402
    PreferenceLossSettings,
    preference_loss,
)
from rl_megatron.losses import dpo_objective, grpo_objective, totals  # noqa: E402

SEQUENCE_TOKENS = 512
REPEATS = 20
# Operations that only make another view of a tensor, or room for one.
FREE = {
    "alias", "as_strided", "detach", "empty", "empty_like", "empty_strided", "expand", "new_empty",
    "new_empty_strided", "permute", "select", "slice", "squeeze", "t", "transpose", "unbind",
    "unsqueeze", "view", "_unsafe_view",
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One loss in one way. `milliseconds` is None where there is nothing to run it on."""

    name: str
    way: str
    device: str
    tokens: int
    milliseconds: float | None
    launches: int
    bytes_per_token: float


class Traffic(TorchDispatchMode):
    """Counts operations that start a kernel, and the bytes of what they are given and return."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = 0
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See torch."""
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ not in FREE:
            self.launches += 1
            for leaf in tree_leaves((args, kwargs, result)):
                if isinstance(leaf, Tensor):
                    self.bytes += leaf.numel() * leaf.element_size()
        return result


def main() -> None:
    """Measure, print a table, write JSON if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--json", type=Path, help="write the rows to this file too")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = measure_all(arguments.tokens, device)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    table = Table(title=f"Losses of {arguments.tokens:,} tokens, forward + backward, on {device}")
    for column in ("loss", "way", "milliseconds", "launches", "bytes/token"):
        table.add_column(column, justify="left" if column in ("loss", "way") else "right")
    for row in rows:
        shown = "no GPU" if row.milliseconds is None else f"{row.milliseconds:.3f}"
        table.add_row(row.name, row.way, shown, str(row.launches), f"{row.bytes_per_token:.0f}")
    Console().print(table)


def measure_all(num_tokens: int, device: torch.device) -> list[Row]:
    """Every loss in both ways."""
    batch = make_batch(num_tokens, device)
    rows = []
    for loss_mode in ("vanilla", "gspo", "cispo"):
        settings = PolicyLossSettings(loss_mode, kl_loss_type="k3", entropy_coef=0.01)
        objective = grpo_objective(
            max_response_tokens=SEQUENCE_TOKENS,
            loss_mode=settings.loss_mode,
            use_kl_loss=True,
            entropy_coef=0.01,
        )
        weighed, counts = objective.weigh(batch), totals(batch)
        kernel = policy_kernel(settings, weighed, counts)
        rows += both_ways(f"grpo {loss_mode}", objective, weighed, counts, kernel)
    objective = dpo_objective(rpo_alpha=1.0)
    weighed, counts = objective.weigh(batch), totals(batch)
    kernel = preference_kernel(PreferenceLossSettings(rpo_alpha=1.0), weighed, counts)
    return [*rows, *both_ways("dpo sigmoid", objective, weighed, counts, kernel)]


def make_batch(num_tokens: int, device: torch.device) -> PackedBatch:
    """Pairs of sequences of one length, a quarter of each a prompt; random numbers."""
    num_sequences = max(2, num_tokens // SEQUENCE_TOKENS // 2 * 2)
    bounds = torch.linspace(0, num_tokens, num_sequences + 1).long()
    place = torch.arange(num_tokens) % SEQUENCE_TOKENS
    torch.manual_seed(0)
    old, ref = (-2 * torch.rand(2, num_tokens)).unbind()
    batch = PackedBatch(
        tokens=torch.zeros(num_tokens, dtype=torch.int64),
        cu_seqlens=bounds,
        response_mask=place >= SEQUENCE_TOKENS // 4,
        sequence_ids=torch.arange(num_sequences),
        paired=True,
        advantages=torch.randn(num_tokens),
        old_logprobs=old,
        ref_logprobs=ref,
    )
    return batch.to(device)


def both_ways(
    name: str,
    objective: Objective,
    batch: PackedBatch,
    counts: Totals,
    kernel: Callable[[Tensor, Tensor], Tensor],
) -> list[Row]:
    """A row for plain torch, and one for the kernel."""
    device, tokens = batch.tokens.device, batch.num_tokens
    logprobs = (batch.advantages * 0 - 1).requires_grad_()
    entropy = (batch.advantages * 0 + 1).requires_grad_()

    def plain() -> None:
        objective.loss(ModelOutput(logprobs, entropy), batch, counts).loss.backward()

    def fused() -> None:
        kernel(logprobs, entropy).backward()

    with Traffic() as traffic:
        plain()
    eager = Row(
        name, "torch", str(device), tokens, timed(plain, device), traffic.launches,
        traffic.bytes / tokens,
    )  # fmt: skip
    on_gpu = device.type == "cuda"
    upstream = torch.ones((), dtype=torch.float64, device=device)
    with recorded(run=on_gpu) as launches, Traffic() as traffic:
        torch.autograd.grad(kernel(logprobs, entropy), logprobs, upstream)
    arrays = [x for started in launches for x in started.args if isinstance(x, Tensor)]
    moved = traffic.bytes + sum(x.numel() * x.element_size() for x in arrays)
    milliseconds = timed(fused, device) if on_gpu else None
    return [
        eager,
        Row(
            name, "kernel", str(device), tokens, milliseconds, traffic.launches + len(launches),
            moved / tokens,
        ),
    ]  # fmt: skip


def timed(run: Callable[[], None], device: torch.device) -> float:
    """Milliseconds of one run, the best of several batches of runs."""
    run()
    best = float("inf")
    for _ in range(3):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(REPEATS):
            run()
        synchronize(device)
        best = min(best, (time.perf_counter() - start) / REPEATS)
    return 1000 * best


def synchronize(device: torch.device) -> None:
    """Wait for what was started on `device`."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def policy_kernel(
    settings: PolicyLossSettings, batch: PackedBatch, counts: Totals
) -> Callable[[Tensor, Tensor], Tensor]:
    """The policy loss as a function of log-probs and entropy."""
    old, advantages, weights = batch.old_logprobs, batch.advantages, batch.loss_weights
    assert old is not None and advantages is not None and weights is not None
    scale = 1 / max(counts.num_tokens, 1)

    def loss(logprobs: Tensor, entropy: Tensor) -> Tensor:
        return policy_loss(
            settings, logprobs, entropy, old, advantages, weights, batch.ref_logprobs,
            batch.cu_seqlens, scale,
        ).loss  # fmt: skip

    return loss


def preference_kernel(
    settings: PreferenceLossSettings, batch: PackedBatch, counts: Totals
) -> Callable[[Tensor, Tensor], Tensor]:
    """The preference loss as a function of log-probs; it has no use for entropy."""
    weights, scale = batch.loss_weights, 1 / max(counts.num_pairs, 1)
    assert weights is not None

    def loss(logprobs: Tensor, entropy: Tensor) -> Tensor:
        return preference_loss(
            settings, logprobs, batch.ref_logprobs, weights, batch.cu_seqlens, scale
        ).loss

    return loss


if __name__ == "__main__":
    main()
