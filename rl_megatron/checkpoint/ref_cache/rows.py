"""The key of a row: its token ids and which of them are response."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from rl_megatron.interfaces.batch import PackedBatch

KEY_BYTES = 16


def row_keys(batch: PackedBatch) -> npt.NDArray[np.uint8]:
    """[N, 16]: BLAKE2b of each sequence's token ids and response mask.

    So a row is found whatever its place in the data, and a row that changed is not found.
    """
    tokens = np.ascontiguousarray(batch.tokens.numpy(), dtype="<i8")
    mask = np.ascontiguousarray(batch.response_mask.numpy(), dtype=np.uint8)
    bounds = batch.cu_seqlens.tolist()
    keys = bytearray()
    for start, end in zip(bounds, bounds[1:], strict=False):
        digest = blake2b(tokens[start:end], digest_size=KEY_BYTES)
        digest.update(mask[start:end])
        keys += digest.digest()
    return np.frombuffer(keys, dtype=np.uint8).reshape(-1, KEY_BYTES)


def sortable(keys: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """[n] the first half of each key, as numbers."""
    halves: npt.NDArray[np.uint64] = (
        np.ascontiguousarray(keys[:, :8]).view(">u8")[:, 0].astype(np.uint64)
    )
    return halves
