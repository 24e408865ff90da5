"""Rewards of a response's length in tokens, the stop token included."""

from __future__ import annotations

from rl_megatron.errors import ConfigError


def length(
    num_tokens: int, *, min_tokens: int = 0, max_tokens: int | None = None, penalty: float = 1.0
) -> float:
    """-penalty for fewer than `min_tokens` or more than `max_tokens` tokens, else 0.0."""
    too_long = max_tokens is not None and num_tokens > max_tokens
    return -penalty if too_long or num_tokens < min_tokens else 0.0


def overlong(
    num_tokens: int, *, max_response_tokens: int, buffer_tokens: int, penalty_factor: float = 1.0
) -> float:
    """0.0 up to the buffer before the maximum, from there down to -penalty_factor at the maximum.

    DAPO (arXiv 2503.14476), equation 13, whose L_max and L_cache are `max_response_tokens` and
    `buffer_tokens`.

    Raises:
        ConfigError: The buffer is longer than the maximum: every response would be punished.
    """
    if not 0 < buffer_tokens <= max_response_tokens:
        raise ConfigError(
            f"rewards.overlong.buffer_tokens ({buffer_tokens}) must be above 0 and not above "
            f"rollout.max_response_tokens ({max_response_tokens}); lower it"
        )
    beyond = num_tokens - (max_response_tokens - buffer_tokens)
    return -penalty_factor * min(1.0, beyond / buffer_tokens) if beyond > 0 else 0.0
