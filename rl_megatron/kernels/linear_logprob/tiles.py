"""How rows and vocabulary are cut into tiles, which bounds what the head holds at once.

The cuts depend on the device and on the shard of the vocabulary alone, never on the number of rows,
and the last tile of rows is filled up: so the result of a row is the same to the last bit whatever
else is in the batch, as matrix products of another height may add up in another order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Products of fewer rows than this take other paths in BLAS.
_ROW_MULTIPLE = 16


class Tiles(NamedTuple):
    """Rows and columns of a tile, and the bytes of logits that one pass may keep at once."""

    rows: int
    columns: int
    kept_bytes: int
    kept_rows: int

    def of_rows(self, num_rows: int) -> list[slice]:
        """The tiles of rows."""
        return _cut(num_rows, self.rows)

    def of_columns(self, num_columns: int) -> list[slice]:
        """The tiles of a shard of the vocabulary."""
        return _cut(num_columns, self.columns)

    def kept_whole(self, num_rows: int, num_columns: int, itemsize: int) -> list[slice]:
        """Tiles of rows whose logits over the whole shard are kept: the one-pass mode. However
        large the shard, `kept_rows` rows are: each tile reads the head twice and its gradient
        once."""
        fit = self.kept_bytes // max(num_columns * itemsize, 1)
        size = max(self.kept_rows, fit // _ROW_MULTIPLE * _ROW_MULTIPLE)
        return _cut(num_rows, min(size, self.rows))


# A tile of a CPU (4 MiB in float32) stays in its last cache between product and row kernel.
CPU_TILES = Tiles(rows=1024, columns=1024, kept_bytes=88 * 2**20, kept_rows=256)
CUDA_TILES = Tiles(rows=4096, columns=8192, kept_bytes=512 * 2**20, kept_rows=1024)


def tiles_for(device: torch.device) -> Tiles:
    """The cuts on `device`."""
    return CUDA_TILES if device.type == "cuda" else CPU_TILES


def filled_up(rows: Tensor) -> Tensor:
    """`rows` [n, H] with rows of 0 behind them, up to a number that BLAS treats like any other."""
    missing = -rows.shape[0] % _ROW_MULTIPLE
    if missing == 0:
        return rows
    return torch.cat([rows, rows.new_zeros(missing, rows.shape[1])])


def _cut(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]
