"""One file of rows: written once, whole or not at all, and never changed."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rl_megatron.checkpoint.publish import durable_file
from rl_megatron.errors import CheckpointError

PATTERN = "ref-*.safetensors"


@dataclass(frozen=True)
class Rows:
    """Rows with their log-probs; mapped from a file, or in memory.

    Attributes:
        keys: [n, 16] see rows.py.
        offsets: [n + 1] where each row's log-probs begin.
        logprobs: [tokens] fp32, of response tokens only, row after row.
    """

    keys: npt.NDArray[np.uint8]
    offsets: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float32]

    @property
    def checksum(self) -> str:
        """BLAKE2b over all three."""
        digest = blake2b(digest_size=16)
        for array in (self.keys, self.offsets, self.logprobs):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()


@dataclass(frozen=True)
class ShardRecord:
    """What the manifest says of a shard."""

    file: str
    rows: int
    tokens: int
    checksum: str


def write_shard(folder: Path, fingerprint_id: str, rows: Rows) -> ShardRecord:
    """Make `rows` durable under a name that follows from them."""
    record = _record(rows)
    tensors = {
        "keys": torch.from_numpy(np.ascontiguousarray(rows.keys)),
        "offsets": torch.from_numpy(np.ascontiguousarray(rows.offsets)),
        "logprobs": torch.from_numpy(np.ascontiguousarray(rows.logprobs)),
    }
    metadata = {"fingerprint": fingerprint_id, "checksum": record.checksum}
    with durable_file(folder / record.file) as aside:
        save_file(tensors, aside, metadata=metadata)
    return record


def open_shard(path: Path, fingerprint_id: str) -> Rows:
    """The rows of a file, mapped: a page is read when it is looked at. Contents are not checked.

    Raises:
        CheckpointError: The file is missing, cut, or belongs to another cache.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            names = list(file.keys())
            found: dict[str, Tensor] = {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        raise _broken(path, f"cannot be read ({error})") from error
    if metadata.get("fingerprint") != fingerprint_id or set(found) != {
        "keys",
        "offsets",
        "logprobs",
    }:
        raise _broken(path, "belongs to another cache")
    return Rows(*(found[name].numpy() for name in ("keys", "offsets", "logprobs")))


def verify_shard(
    path: Path, fingerprint_id: str, expected: ShardRecord | None = None
) -> ShardRecord:
    """Read a file through and say what it holds.

    Args:
        path: The file.
        fingerprint_id: Of the cache.
        expected: What the manifest says; None: the file's own checksum.

    Raises:
        CheckpointError: As `open_shard`, or the contents are not what was written.
    """
    rows = open_shard(path, fingerprint_id)
    record = _record(rows)
    with safe_open(path, framework="pt", device="cpu") as file:
        written = file.metadata()["checksum"]
    if record.checksum != written or (expected is not None and record != expected):
        raise _broken(path, "does not hold what was written: its checksum is another")
    return record


def _record(rows: Rows) -> ShardRecord:
    checksum = rows.checksum
    name = f"ref-{checksum[:16]}.safetensors"
    return ShardRecord(name, len(rows.keys), len(rows.logprobs), checksum)


def _broken(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"The shard {path} {what}. Run tools/ref_cache.py build with the run's config: it keeps "
        "the good shards and computes the rows of this one again."
    )
