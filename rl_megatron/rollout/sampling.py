"""From the logits of the next token to a token and its log-prob: one set of rules for all engines.

Rules are applied in the order temperature, top_k, top_p, min_p (that of most engines). The
log-prob returned is under the distribution that was sampled from, after all of them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rl_megatron.errors import NumericsError
from rl_megatron.interfaces.records import Sampling
from rl_megatron.kernels.linear_logprob import logits_logprob


def allowed_logits(logits: Tensor, sampling: Sampling, num_sampled: Tensor) -> Tensor:
    """Logits [n, V] fp32 of the distribution to sample from; -inf on tokens that are out.

    Args:
        logits: [n, V], any float type.
        sampling: The rules. Temperature 0 gives the distribution at temperature 1 (its mode is
            what `sample` takes).
        num_sampled: [n] tokens already sampled in each response (stop tokens wait for
            `min_response_tokens`).
    """
    z = logits.float()
    if sampling.temperature > 0:
        z = z / sampling.temperature
    if sampling.min_response_tokens > 0 and sampling.stop_token_ids:
        early = num_sampled < sampling.min_response_tokens
        stops = torch.tensor(sampling.stop_token_ids, device=z.device)
        blocked = torch.zeros_like(z, dtype=torch.bool)
        blocked[:, stops] = early[:, None]
        z = z.masked_fill(blocked, -torch.inf)
    if 0 < sampling.top_k < z.shape[1]:
        lowest = z.topk(sampling.top_k, dim=1).values[:, -1:]
        z = z.masked_fill(z < lowest, -torch.inf)
    if sampling.top_p < 1.0:
        z = z.masked_fill(_outside_nucleus(z, sampling.top_p), -torch.inf)
    if sampling.min_p > 0.0:
        p = z.softmax(dim=1)
        z = z.masked_fill(p < sampling.min_p * p.max(dim=1, keepdim=True).values, -torch.inf)
    return z


def _outside_nucleus(z: Tensor, top_p: float) -> Tensor:
    """True on tokens outside the smallest set of likeliest tokens with mass >= top_p."""
    p, order = z.softmax(dim=1).sort(dim=1, descending=True, stable=True)
    # The mass before the likeliest token is exactly 0, so it is never outside.
    outside = p.cumsum(dim=1) - p >= top_p
    return torch.zeros_like(outside).scatter(1, order, outside)


def sample(
    logits: Tensor, sampling: Sampling, num_sampled: Tensor, numbers: npt.NDArray[np.float64]
) -> tuple[Tensor, Tensor]:
    """Tokens [n] and their log-probs [n] fp32, on the device of the logits.

    Args:
        logits, sampling, num_sampled: As in `allowed_logits`.
        numbers: [n] uniform numbers in [0, 1); they pick the tokens by inversion.

    Raises:
        NumericsError: The logits are not finite, or no token is allowed.
    """
    z = allowed_logits(logits, sampling, num_sampled)
    mass = z.log_softmax(dim=1).double().exp().cumsum(dim=1)
    if not bool(mass[:, -1].isfinite().all()):
        raise NumericsError(
            "the model's logits are not finite, so nothing can be sampled from them: its weights "
            "are broken. Start again from an earlier checkpoint, with a lower optimizer.lr."
        )
    if sampling.temperature == 0:
        tokens = z.argmax(dim=1)
    else:
        point = torch.from_numpy(numbers).to(mass.device)[:, None] * mass[:, -1:]
        # The first token whose cumulated mass is above the point: never one of mass 0.
        tokens = torch.searchsorted(mass, point, right=True)[:, 0]
    return tokens, logits_logprob(z, tokens)
