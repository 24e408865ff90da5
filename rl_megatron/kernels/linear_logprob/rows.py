"""The seam between the fused head and what computes it: kernels that see one tile of logits.

A tile is [n, V]: n rows (tokens) and V columns, a stretch of the vocabulary. With x = W h the raw
logits, z = cap(x) / temperature, where cap(x) = softcap tanh(x / softcap) or x. Everything about
chunks, ranks and memory stands above the seam (`op`); implementations stand below.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class RowKernels(Protocol):
    """What an implementation computes of a tile. `column` is each row's target, from the tile's
    first column on; outside [0, V) it is another tile's. A row's result depends on nothing else in
    the tile. All tensors of n numbers are in the dtype of the logits."""

    name: str

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """x = hidden [n, H] weight[V, H]^T, [n, V], accumulated and returned in fp32 (fp64 for
        fp64 inputs). Both inputs have one dtype."""
        ...

    def statistics(
        self, logits: Tensor, column: Tensor, inv_temperature: Tensor, softcap: float | None
    ) -> Tensor:
        """[4, n]: m = max z, s = sum e^(z - m), u = sum e^(z - m) (z - m), and z of the target (0
        where it is in no column). A row of nothing but -inf has m = -inf and s = u = 0."""
        ...

    def gradient(
        self,
        logits: Tensor,
        column: Tensor,
        inv_temperature: Tensor,
        softcap: float | None,
        top: Tensor,
        log_sum: Tensor,
        entropy: Tensor,
        g_logprob: Tensor,
        g_entropy: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        """Gradient to x, [n, V] in `dtype`; may overwrite `logits`.

        With ln p = z - top - log_sum over the whole vocabulary and H the entropy:
        [g_logprob (1_target - p) - g_entropy p (ln p + H)] cap'(x) / temperature, worked out in the
        dtype of the logits, target included, and then rounded."""
        ...

    def hidden_gradient(self, dlogits: Tensor, weight: Tensor) -> Tensor:
        """dlogits [n, V] weight [V, H], accumulated and returned in fp32 (fp64)."""
        ...

    def add_weight_gradient(self, into: Tensor, dlogits: Tensor, hidden: Tensor) -> None:
        """into [V, H] += dlogits^T hidden, accumulated in the dtype of `into`, fp32 (fp64)."""
        ...

    def join(self, high: Tensor, tail: Tensor, total: Tensor) -> None:
        """See `sums`."""
        ...

    def split(self, total: Tensor, high: Tensor, tail: Tensor) -> None:
        """See `sums`."""
        ...
