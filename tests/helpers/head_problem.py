"""Problems for the fused head at the numbers of a real one, and how far off an answer is."""

from __future__ import annotations

import torch
from torch import Tensor

# Temperature and softcap; "rows": a temperature of its own for every row.
CASES: dict[str, tuple[float | str, float | None]] = {
    "plain": (1.0, None),
    "temperature": (0.7, None),
    "temperature-per-row": ("rows", None),
    "softcap": (1.0, 1.5),
    "softcap-and-temperature-per-row": ("rows", 30.0),
}
# Which of log-prob and entropy the loss reads.
USED = {"both": (1.0, 1.0), "logprob": (1.0, 0.0), "entropy": (0.0, 1.0)}


def head_problem(
    rows: int, width: int, vocab: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Hidden states [rows, width] and head [vocab, width] whose logits have a spread of about 1,
    targets, and the gradients that arrive at log-prob and entropy."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, width, generator=generator).to(dtype)
    weight = torch.randn(vocab, width, generator=generator) * width**-0.5
    targets = torch.randint(0, vocab, (rows,), generator=generator)
    upstream = (torch.randn(rows, generator=generator), torch.randn(rows, generator=generator))
    return hidden.requires_grad_(), weight.to(dtype).requires_grad_(), targets, upstream


def temperature_of(case: str, rows: int) -> float | Tensor:
    """The temperature of a case, for that many rows."""
    temperature = CASES[case][0]
    return torch.linspace(0.5, 2.0, rows) if isinstance(temperature, str) else temperature


def gradients(
    values: tuple[Tensor, Tensor], upstream: tuple[Tensor, Tensor], inputs: list[Tensor]
) -> list[Tensor]:
    """Gradients of <log-probs, upstream[0]> + <entropy, upstream[1]>."""
    total = sum((v.double() * g.double()).sum() for v, g in zip(values, upstream, strict=True))
    return list(torch.autograd.grad(total, inputs))


def relative(found: Tensor, exact: Tensor) -> float:
    """Norm of the difference over that of the exact tensor."""
    found, exact = found.detach().double(), exact.detach().double()
    return float((found - exact).norm() / exact.norm())


def largest_relative(found: Tensor, exact: Tensor) -> float:
    """The largest difference of an element, relative to that element; what is 0 must be 0."""
    off = (found.detach().double() - exact.detach()).abs()
    return float(torch.where(off == 0, 0.0, off / exact.detach().abs()).max())
