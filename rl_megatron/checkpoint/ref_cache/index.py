"""Where each row is: sorted by key, mapped, so that memory does not grow with the data."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rl_megatron.checkpoint.publish import durable_file
from rl_megatron.checkpoint.ref_cache.rows import sortable
from rl_megatron.checkpoint.ref_cache.shard import Rows
from rl_megatron.errors import CheckpointError

MISSING = -1


class Index:
    """Place of a row by its key: shard and row in it.

    Attributes:
        halves: [n] first halves of the keys, increasing.
        places: [n, 2] shard and row.
    """

    def __init__(self, halves: npt.NDArray[np.uint64], places: npt.NDArray[np.int32]) -> None:
        self.halves = halves
        self.places = places

    def find(self, keys: npt.NDArray[np.uint8], shards: Sequence[Rows]) -> npt.NDArray[np.int32]:
        """[n, 2] places of n keys; (MISSING, MISSING) where a key is in no shard."""
        wanted = sortable(keys)
        found = np.full((len(keys), 2), MISSING, dtype=np.int32)
        starts = np.searchsorted(self.halves, wanted, side="left")
        ends = np.searchsorted(self.halves, wanted, side="right")
        # Python's numbers and bytes: numpy takes ten times as long over one of its own.
        for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
            key = keys[row].tobytes()
            # More than one only if two halves agree by chance, or a row is there twice.
            for shard, at in self.places[start:end].tolist():
                if shards[shard].keys[at].tobytes() == key:
                    found[row] = shard, at
                    break
        return found


def write_index(folder: Path, shards: Sequence[Rows]) -> str:
    """Make the index of `shards` durable; the name of its file. A row may be there twice."""
    halves = np.concatenate([sortable(rows.keys) for rows in shards] or [np.zeros(0, np.uint64)])
    numbers = [np.full(len(rows.keys), i, dtype=np.int32) for i, rows in enumerate(shards)]
    places = [np.arange(len(rows.keys), dtype=np.int32) for rows in shards]
    order = np.argsort(halves, kind="stable")
    empty = [np.zeros(0, np.int32)]
    both = np.stack([np.concatenate(numbers or empty), np.concatenate(places or empty)], axis=1)
    tensors = {
        "halves": torch.from_numpy(halves[order].view(np.int64)),
        "places": torch.from_numpy(np.ascontiguousarray(both[order])),
    }
    digest = blake2b(digest_size=8)
    for tensor in tensors.values():
        digest.update(tensor.numpy().data)
    name = f"index-{digest.hexdigest()}.safetensors"
    with durable_file(folder / name) as aside:
        save_file(tensors, aside)
    return name


def open_index(path: Path) -> Index:
    """The index in a file, mapped.

    Raises:
        CheckpointError: The file is missing, cut, or not what was written.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            halves, places = (file.get_tensor(name).numpy() for name in ("halves", "places"))
    except (SafetensorError, OSError) as error:
        raise _broken(path, f"cannot be read ({error})") from error
    digest = blake2b(halves.data, digest_size=8)
    digest.update(places.data)
    if path.name != f"index-{digest.hexdigest()}.safetensors":
        raise _broken(path, "does not hold what was written")
    return Index(halves.view(np.uint64), places)


def _broken(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"The index {path} {what}. Run tools/ref_cache.py build with the run's config: it makes "
        "the index again from the shards."
    )
