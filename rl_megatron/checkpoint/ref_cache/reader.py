"""Log-probs of rows out of a cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rl_megatron.checkpoint.ref_cache.fingerprint import Fingerprint
from rl_megatron.checkpoint.ref_cache.index import MISSING, open_index
from rl_megatron.checkpoint.ref_cache.manifest import (
    Manifest,
    agreed_manifest,
    check_fingerprint,
)
from rl_megatron.checkpoint.ref_cache.rows import row_keys
from rl_megatron.checkpoint.ref_cache.shard import open_shard, verify_shard
from rl_megatron.errors import CheckpointError
from rl_megatron.interfaces.batch import PackedBatch
from rl_megatron.parallel.process import Process


class RefCache:
    """An open cache. All of it is mapped: what is in memory are pages that can be dropped.

    Attributes:
        folder: Where it is.
        manifest: What it holds.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._index = open_index(folder / manifest.index)
        self._shards = [
            open_shard(folder / shard.file, manifest.fingerprint.id) for shard in manifest.shards
        ]

    @classmethod
    def open(cls, folder: Path, fingerprint: Fingerprint, process: Process) -> RefCache:
        """The cache in `folder`, checked byte by byte; ranks share that work. Collective.

        Raises:
            CheckpointError: There is none, it holds the log-probs of something else, or a file is
                damaged; the message says what.
        """
        manifest = agreed_manifest(folder, process)
        if manifest is None:
            raise CheckpointError(
                f"There is no reference cache in {folder}. Build it with tools/ref_cache.py build, "
                "or set reference.build_cache=true."
            )
        check_fingerprint(manifest, fingerprint, folder)
        message = None
        try:
            for shard in manifest.shards[process.rank :: process.layout.world_size]:
                verify_shard(folder / shard.file, fingerprint.id, shard)
            cache = cls(folder, manifest)
        except CheckpointError as error:
            message = str(error)
        # All ranks stop together, and with the same words.
        messages = [text for text in process.gather(message) if text is not None]
        if messages:
            raise CheckpointError(messages[0])
        return cache

    def missing(self, batch: PackedBatch) -> list[int]:
        """Sequences of `batch` that the cache does not hold."""
        found = self._index.find(row_keys(batch), self._shards)
        return [int(row) for row in np.flatnonzero(found[:, 0] == MISSING)]

    def logprobs(self, batch: PackedBatch) -> Tensor:
        """[T] fp32 on the host, 0 outside the response mask, as a backend gives it.

        Raises:
            CheckpointError: A row is not in the cache.
        """
        found = self._index.find(row_keys(batch), self._shards)
        absent = np.flatnonzero(found[:, 0] == MISSING)
        if len(absent):
            raise CheckpointError(
                f"{len(absent)} of {len(found)} rows of a batch are not in the reference cache "
                f"{self.folder}, the first being row {int(batch.sequence_ids[absent[0]])}. Rows or "
                "the tokenizer have changed since it was built: run tools/ref_cache.py build, or "
                "set reference.build_cache=true."
            )
        parts = []
        for shard, row in found.tolist():
            rows = self._shards[shard]
            start, end = rows.offsets[row : row + 2].tolist()
            parts.append(rows.logprobs[start:end])
        result = torch.zeros(batch.num_tokens, dtype=torch.float32)
        # Sequences lie in order, and so do the response tokens of each.
        result[batch.response_mask] = torch.from_numpy(np.concatenate(parts))
        return result
