"""Time and memory of log-probs with and without the logits, forward and backward.

    python tools/bench/logprobs.py

Each case runs in a process of its own, so that its peak memory is its own. On a GPU where there is
one, else on one CPU thread.
"""

import multiprocessing
import resource
import time

import torch
from rich.console import Console
from rich.table import Table

from rl_megatron.kernels.linear_logprob import linear_logprob

# Name, tokens of a micro-batch, hidden size, vocabulary size.
CASES = (
    ("SmolLM2-135M", 2048, 576, 49152),
    ("Qwen3-0.6B", 512, 1024, 151936),
)
REPEATS = 2


def main() -> None:
    """Measure every case both ways and print a table."""
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "one CPU thread"
    table = Table(title=f"Log-prob and entropy of a micro-batch, forward + backward, on {where}")
    for column in ("head of", "way", "tokens", "vocabulary", "seconds", "tokens/s", "peak MiB"):
        table.add_column(column, justify="left" if column in ("head of", "way") else "right")
    for name, num_tokens, hidden_size, vocab_size in CASES:
        for way in WAYS:
            seconds, peak_bytes = in_own_process(way, num_tokens, hidden_size, vocab_size)
            table.add_row(
                name,
                way,
                f"{num_tokens:,}",
                f"{vocab_size:,}",
                f"{seconds:.2f}",
                f"{num_tokens / seconds:,.0f}",
                f"{peak_bytes / 2**20:,.0f}",
            )
    Console().print(table)


def in_own_process(
    way: str, num_tokens: int, hidden_size: int, vocab_size: int
) -> tuple[float, int]:
    """What `measure` says, from a fresh process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, (way, num_tokens, hidden_size, vocab_size))


def measure(way: str, num_tokens: int, hidden_size: int, vocab_size: int) -> tuple[float, int]:
    """Best seconds of a forward and backward pass, and the bytes it takes at its peak.

    The gradient of the head is among them, the head itself is not.
    """
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    hidden = torch.randn(num_tokens, hidden_size, device=device, requires_grad=True)
    head = torch.empty(vocab_size, hidden_size, device=device).normal_(std=hidden_size**-0.5)
    head.requires_grad_()
    targets = torch.randint(vocab_size, (num_tokens,), device=device)
    before = peak_memory(device)
    best = float("inf")
    for _ in range(REPEATS):
        hidden.grad = head.grad = None
        start = time.perf_counter()
        logprobs, entropy = WAYS[way](hidden, head, targets)
        (logprobs.sum() + entropy.detach().sum()).backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best, peak_memory(device) - before


def peak_memory(device: torch.device) -> int:
    """Bytes that this process has held at once so far, on the device or in memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def from_hidden(
    hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob and entropy as this project computes them."""
    return linear_logprob(hidden, head, targets, 1.0, head.shape[0])


def from_logits(
    hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob and entropy by way of all logits."""
    all_logprobs = torch.log_softmax(hidden @ head.T, dim=-1)
    entropy = -(all_logprobs.detach().exp() * all_logprobs.detach()).sum(-1)
    return all_logprobs.gather(1, targets[:, None])[:, 0], entropy


WAYS = {"hidden": from_hidden, "logits": from_logits}

if __name__ == "__main__":
    main()
