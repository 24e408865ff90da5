"""The naive formula of log-probs and entropy, in float64 with all logits: an oracle."""

from __future__ import annotations

import torch
from torch import Tensor


def dense_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy, float64, differentiable; 0 where the target is -1."""
    logprobs = (hidden.double() @ weight.double().t() / temperature).log_softmax(dim=1)
    picked = logprobs.gather(1, targets.clamp(min=0)[:, None])[:, 0]
    p = logprobs.exp()
    entropy = -torch.where(p > 0, p * logprobs.clamp(min=-1e30), 0.0).sum(dim=1)
    asked = targets >= 0
    return torch.where(asked, picked, 0.0), torch.where(asked, entropy, 0.0)


def gradients(
    values: tuple[Tensor, Tensor], upstream: tuple[Tensor, Tensor], inputs: list[Tensor]
) -> list[Tensor]:
    """Gradients of <log-probs, upstream[0]> + <entropy, upstream[1]>."""
    total = sum((v.double() * g.double()).sum() for v, g in zip(values, upstream, strict=True))
    return list(torch.autograd.grad(total, inputs))
