"""`reference`: log-prob and entropy by way of all logits, differentiated by autograd. An oracle."""

from __future__ import annotations

import torch
from torch import Tensor


def plain_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float | Tensor,
    vocab_size: int,
    softcap: float | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy [T] each, 0 where the target is negative.

    Shapes as in `linear_logprob`, on one rank. Everything is computed in `dtype`, or in float32
    (float64 for float64 inputs) if it is None, and [T, vocabulary] is there in full.
    """
    if dtype is None:
        promoted = torch.promote_types(hidden.dtype, weight.dtype)
        dtype = torch.float64 if promoted == torch.float64 else torch.float32
    asked = targets >= 0
    # A row nobody asks for has no gradient, whatever it holds.
    used = torch.where(asked[:, None], hidden, 0.0).to(dtype)
    logits = used @ weight[:vocab_size].to(dtype).t()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if isinstance(temperature, Tensor):
        temperature = temperature.to(dtype)[:, None]
    logprobs = (logits / temperature).log_softmax(dim=1)
    picked = logprobs.gather(1, targets.long().clamp(min=0)[:, None])[:, 0]
    p = logprobs.exp()
    # A probability of 0 adds nothing, and one that is NaN is not lost.
    terms = torch.where(p == 0, 0.0, p * logprobs.clamp(min=torch.finfo(dtype).min))
    entropy = -terms.sum(dim=1)
    return torch.where(asked, picked, 0.0), torch.where(asked, entropy, 0.0)
