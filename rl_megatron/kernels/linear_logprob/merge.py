"""From the statistics of parts of the vocabulary to log-prob and entropy of the whole.

With z the logits, m = max z, s = sum e^(z - m) and u = sum e^(z - m) (z - m): log-prob of y is
z_y - m - ln s, and the entropy is ln s - u / s. The four numbers (m, s, u, z_y) of parts merge into
those of the whole. All in float64, which is nothing for a number per row: ln s is a few nats, where
one float32 is 5e-7 from the next, and that would be the better part of the difference between two
layouts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class RowResult(NamedTuple):
    """Four times [n]. `top` and `log_sum` are kept apart: z - top is exact where z is close to it,
    however large both are."""

    top: Tensor
    log_sum: Tensor
    entropy: Tensor
    logprob: Tensor

    def to(self, dtype: torch.dtype) -> RowResult:
        """All of it in `dtype`, rounded once."""
        return RowResult(*(x.to(dtype) for x in self))


def merge(parts: Tensor) -> Tensor:
    """(m, s, u, z_y) [4, n] float64 from those of parts [num_parts, 4, n], in their order."""
    m, s, u, z_y = parts.double().unbind(dim=1)
    top = m.max(dim=0).values
    # A part of nothing but -inf has nothing to add; its distance to the top would be NaN.
    shift = torch.where(m == -torch.inf, 0.0, m - top)
    scale = torch.where(m == -torch.inf, 0.0, shift.exp())
    total = (s * scale).sum(dim=0)
    weighted = ((u + s * shift) * scale).sum(dim=0)
    return torch.stack([top, total, weighted, z_y.sum(dim=0)])


def finish(statistics: Tensor) -> RowResult:
    """What rows are, float64, from (m, s, u, z_y) [4, n] of the whole vocabulary."""
    top, total, weighted, z_y = statistics
    log_sum = total.log()
    return RowResult(top, log_sum, log_sum - weighted / total, z_y - top - log_sum)
