"""Advantages as pure functions of rewards."""

from rl_megatron.advantages.groups import (
    ADVANTAGES,
    Advantages,
    compute_advantages,
    to_tokens,
    with_advantages,
)

__all__ = [
    "ADVANTAGES",
    "Advantages",
    "compute_advantages",
    "to_tokens",
    "with_advantages",
]
