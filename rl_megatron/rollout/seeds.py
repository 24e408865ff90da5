"""Random numbers of sampling, from a counter: no generator, no state, no order.

The uniform number that picks token t of a response is a hash of (seed, prompt row, sample index,
t). So a response is the same on any layout, in any batch and after any restart, and two samples
of one prompt never share their numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def stream_key(*parts: int) -> int:
    """A 64-bit key for a tuple of integers, e.g. (run seed, rollout batch)."""
    digest = blake2b(digest_size=8)
    for part in parts:
        digest.update(part.to_bytes(16, "little", signed=True))
    return int.from_bytes(digest.digest(), "little")


def uniforms(keys: Sequence[int], counters: Sequence[int]) -> npt.NDArray[np.float64]:
    """One uniform number in [0, 1) for each (stream key, counter): SplitMix64's output function."""
    with np.errstate(over="ignore"):
        x = np.array(keys, dtype=np.uint64)
        x += (np.array(counters, dtype=np.uint64) + np.uint64(1)) * _GOLDEN
        x = (x ^ (x >> np.uint64(30))) * _MIX_1
        x = (x ^ (x >> np.uint64(27))) * _MIX_2
        x ^= x >> np.uint64(31)
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53
