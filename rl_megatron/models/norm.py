"""RMSNorm as a Megatron layer-spec module, with sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class RMSNorm(torch.nn.Module):
    """Root-mean-square normalisation over the last dimension (Zhang and Sennrich 2019, eq. 4).

    Megatron's own torch norm refuses sequence parallelism. There each rank sees only its part of
    the sequence, so the weight is marked for Megatron to sum its gradient over the tensor group.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """`x` normalised in fp32 and scaled, in the dtype of `x`."""
        normalised = torch.nn.functional.rms_norm(x.float(), (x.shape[-1],), eps=self.eps)
        return self.weight * normalised.to(x.dtype)
