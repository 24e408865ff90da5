"""Which row stands at which place of a run: a function of (seed, epoch, place) and nothing else.

A run that is at place p has consumed the rows of the places before p. So its position is one
number, the same for any number of ranks, and whatever was in flight when a job stopped is drawn
again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

_UINT64 = 2**64


class PositionSampler:
    """The endless order of rows: one epoch after the other, each a permutation of its own.

    Attributes:
        num_rows: Rows of an epoch.
    """

    def __init__(self, num_rows: int, seed: int, shuffle: bool) -> None:
        assert num_rows > 0, "a data set without rows is refused when it is read"
        self.num_rows = num_rows
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = -1
        self._order: NDArray[np.int64] = np.arange(num_rows)

    def row(self, position: int) -> int:
        """Index of the row at a place of the run, counted from 0 over all epochs."""
        epoch, offset = divmod(position, self.num_rows)
        if not self._shuffle:
            return offset
        if epoch != self._epoch:
            # Sorting raw draws instead of asking NumPy for a permutation: only the raw streams of
            # its bit generators are promised to stay the same in later versions.
            key = np.array([self._seed % _UINT64, epoch], dtype=np.uint64)
            draws = np.random.Philox(key=key).random_raw(self.num_rows)
            self._order = np.argsort(draws, kind="stable")
            self._epoch = epoch
        return int(self._order[offset])

    def take(self, start: int, count: int) -> list[int]:
        """Rows of the places start .. start + count - 1; they may straddle the end of an epoch."""
        return [self.row(position) for position in range(start, start + count)]


def data_digest(sequences: Iterable[Sequence[int]]) -> str:
    """A fingerprint of tokenized data, by which a resumed run knows that its position still holds.

    Args:
        sequences: Token ids of all rows, in order.
    """
    digest = hashlib.sha256()
    for ids in sequences:
        digest.update(len(ids).to_bytes(8, "little"))
        digest.update(np.asarray(ids, dtype="<i8").tobytes())
    return digest.hexdigest()
