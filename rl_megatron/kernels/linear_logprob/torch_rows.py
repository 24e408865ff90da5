"""`torch`: row kernels in plain torch, on any device, in float32 and float64."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_megatron.kernels.linear_logprob import sums


class TorchRows:
    """See `RowKernels`. A few temporaries of the size of a tile."""

    name = "torch"

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """See `RowKernels`."""
        return _product(hidden, weight.t())

    def statistics(
        self, logits: Tensor, column: Tensor, inv_temperature: Tensor, softcap: float | None
    ) -> Tensor:
        """See `RowKernels`."""
        z = _capped(logits, softcap) * inv_temperature[:, None]
        m = z.max(dim=1).values
        # A row that is -inf throughout has no maximum to subtract; its sums are 0.
        shifted = z - torch.where(m == -torch.inf, 0.0, m)[:, None]
        e = shifted.exp()
        u = torch.where(e > 0, e * shifted, 0.0).sum(dim=1)
        here = (column >= 0) & (column < z.shape[1])
        z_y = z.gather(1, column.clamp(0, z.shape[1] - 1)[:, None])[:, 0]
        # A NaN must not be taken for an exponential that is 0.
        u = torch.where(m.isnan(), m, u)
        return torch.stack([m, e.sum(dim=1), u, torch.where(here, z_y, 0.0)])

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
        """See `RowKernels`."""
        capped = _capped(logits, softcap)
        log_p = capped * inv_temperature[:, None] - top[:, None] - log_sum[:, None]
        p = log_p.exp()
        spread = torch.where(p > 0, p * (log_p + entropy[:, None]), 0.0 * p)
        dz = -g_logprob[:, None] * p - g_entropy[:, None] * spread
        here = torch.nonzero((column >= 0) & (column < logits.shape[1]))[:, 0]
        dz[here, column[here]] += g_logprob[here]
        dz *= inv_temperature[:, None]
        if softcap is not None:
            dz *= 1 - (capped / softcap).square()
        return dz.to(dtype)

    def hidden_gradient(self, dlogits: Tensor, weight: Tensor) -> Tensor:
        """See `RowKernels`."""
        return _product(dlogits, weight)

    def add_weight_gradient(self, into: Tensor, dlogits: Tensor, hidden: Tensor) -> None:
        """See `RowKernels`."""
        if into.dtype == dlogits.dtype:
            into.addmm_(dlogits.t(), hidden)
        else:
            into += _product(dlogits.t(), hidden)

    def join(self, high: Tensor, tail: Tensor, total: Tensor) -> None:
        """See `RowKernels`."""
        sums.join(high, tail, total)

    def split(self, total: Tensor, high: Tensor, tail: Tensor) -> None:
        """See `RowKernels`."""
        sums.split(total, high, tail)


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b; of half-precision operands accumulated and returned in float32."""
    if a.dtype in (torch.float32, torch.float64):
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()
