"""By which code the head and the losses are computed."""

from __future__ import annotations

from typing import Literal

from rl_megatron.config.base import Strict


class KernelConfig(Strict):
    """By which code log-probs and losses are computed: for speed and memory, never for a number."""

    linear_logprob: Literal["auto", "torch", "cpu", "triton"] = "auto"
    """From hidden states to log-probs. auto: triton on a GPU; on a CPU the compiled kernels where a
    C++ compiler is found; torch elsewhere."""

    losses: Literal["auto", "torch", "triton"] = "auto"
    """From log-probs to the loss. auto: triton on a GPU, torch elsewhere."""

    one_pass: bool = False
    """Compute the gradient of the head in the forward pass: three matrix products instead of four,
    for a float32 copy of the head's gradient that waits for the backward pass."""
