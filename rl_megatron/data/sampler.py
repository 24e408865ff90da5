"""Which row stands at which place of a run: a function of (seed, epoch, place) and nothing else.

A run that is at place p has consumed the rows of the places before p. So its position is one
number, the same for any number of ranks, and whatever was in flight when a job stopped is drawn
again.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_megatron.errors import CheckpointError

_UINT64 = 2**64

logger = logging.getLogger(__name__)


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


class RowCursor:
    """Where a run stands in its rows. Only rows that were trained on count as passed.

    Args:
        order: Which row comes when.
        digest: Of the rows (`data_digest`): a position means nothing in others.
        may_change: Whether a run that goes on with other rows begins at the first of them. If not
            it is refused.

    Attributes:
        position: Rows passed, over all epochs.
    """

    def __init__(self, order: PositionSampler, digest: str, may_change: bool = False) -> None:
        self.position = 0
        self._order = order
        self._digest = digest
        self._may_change = may_change

    def peek(self, count: int, skip: int = 0) -> list[int]:
        """Indices of the next rows, after the next `skip`, without passing them."""
        return self._order.take(self.position + skip, count)

    def take(self, count: int) -> list[int]:
        """Indices of the next rows, which are passed."""
        rows = self.peek(count)
        self.position += count
        return rows

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""
        return {
            "position": self.position,
            "num_rows": self._order.num_rows,
            "digest": self._digest,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there.

        Raises:
            CheckpointError: The rows are others, and may not change.
        """
        if state["digest"] == self._digest:
            self.position = int(state["position"])
            return
        said = (
            f"data.train has other rows than when the run was saved: {self._order.num_rows} now, "
            f"{state['num_rows']} then"
        )
        if not self._may_change:
            raise CheckpointError(
                f"{said}. Give it those of then, or set checkpoint.allow_changes=[data.train] to "
                "go on with the first of the new rows."
            )
        logger.warning("%s; the run goes on with the first of the new rows", said)
        self.position = 0


def data_digest(rows: Iterable[object]) -> str:
    """A fingerprint of tokenized data, by which a resumed run knows that its position still holds.

    Args:
        rows: All rows, in order: dataclasses, token ids, or anything with a faithful `repr`.
    """
    digest = hashlib.sha256()
    for row in rows:
        _add(digest, row)
    return digest.hexdigest()


def _add(digest: Any, value: object) -> None:
    if is_dataclass(value):
        for part in fields(value):
            _add(digest, getattr(value, part.name))
    elif isinstance(value, tuple | list) and all(isinstance(item, int) for item in value):
        digest.update(len(value).to_bytes(8, "little"))
        digest.update(np.asarray(value, dtype="<i8").tobytes())
    else:
        text = repr(value).encode()
        digest.update(len(text).to_bytes(8, "little"))
        digest.update(text)
