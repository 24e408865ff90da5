"""Fills a cache: shard by shard, each of which stays whatever happens to the rest of the build."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from torch import Tensor

from rl_megatron.checkpoint.ref_cache.fingerprint import Fingerprint
from rl_megatron.checkpoint.ref_cache.index import write_index
from rl_megatron.checkpoint.ref_cache.manifest import Manifest, write_manifest
from rl_megatron.checkpoint.ref_cache.rows import row_keys
from rl_megatron.checkpoint.ref_cache.shard import (
    PATTERN,
    Rows,
    ShardRecord,
    open_shard,
    verify_shard,
    write_shard,
)
from rl_megatron.errors import CheckpointError
from rl_megatron.interfaces.batch import PackedBatch
from rl_megatron.parallel.process import Process

_MAKE_ROOM = "Make room there, and start again: the shards that are written stay."

logger = logging.getLogger(__name__)


class RefCacheWriter:
    """Writes into `folder`, which may hold shards of a build that was killed.

    Every call is made by all ranks together. Each rank writes its share of the shards, in a thread
    of its own, while the next rows are computed.
    """

    def __init__(self, folder: Path, fingerprint: Fingerprint, process: Process) -> None:
        self.folder = folder
        self._fingerprint = fingerprint
        self._process = process
        self._turn = 0
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._written: list[Future[ShardRecord]] = []
        if process.is_main:
            folder.mkdir(parents=True, exist_ok=True)
        process.barrier()
        self._held = self._scan()

    def missing(self, batch: PackedBatch) -> list[int]:
        """Sequences of `batch` that no shard holds; of equal ones the first."""
        seen: set[bytes] = set()
        rows = []
        for row, key in enumerate(map(bytes, row_keys(batch))):
            if key not in self._held and key not in seen:
                rows.append(row)
            seen.add(key)
        return rows

    def add(self, batch: PackedBatch, logprobs: Tensor) -> None:
        """Take the log-probs [T] of all sequences of `batch`; one of the ranks writes them."""
        keys = row_keys(batch)
        self._held.update(map(bytes, keys))
        writer = self._turn % self._process.layout.world_size
        self._turn += 1
        if writer == self._process.rank:
            rows = _rows(keys, batch, logprobs)
            job = self._thread.submit(write_shard, self.folder, self._fingerprint.id, rows)
            self._written.append(job)

    def finish_writing(self) -> None:
        """Wait until what was added is on disk. Not collective."""
        self._thread.shutdown()

    def publish(self, about: dict[str, Any]) -> None:
        """Let everything that has been written count.

        Raises:
            CheckpointError: A file could not be written, on whichever rank.
        """
        problem = None
        self.finish_writing()
        try:
            for job in self._written:
                job.result()
        except (OSError, SafetensorError) as error:
            problem = f"A shard could not be written to {self.folder}: {error}. {_MAKE_ROOM}"
        self._stop_together(problem)
        if self._process.is_main:
            try:
                self._write_manifest(about)
            except (OSError, SafetensorError) as error:
                problem = f"The manifest of {self.folder} could not be written: {error}. "
                problem += _MAKE_ROOM
        self._stop_together(problem)

    def _stop_together(self, problem: str | None) -> None:
        """Raise on all ranks what any of them has met. Collective."""
        problems = [text for text in self._process.gather(problem) if text is not None]
        if problems:
            raise CheckpointError(problems[0])

    def _write_manifest(self, about: dict[str, Any]) -> None:
        shards = dict(self._good_shards())
        records = tuple(shards[path] for path in sorted(shards))
        opened = [open_shard(self.folder / record.file, self._fingerprint.id) for record in records]
        index = write_index(self.folder, opened)
        write_manifest(self.folder, Manifest(self._fingerprint, records, index, about))

    def _scan(self) -> set[bytes]:
        """Keys in whole shards, on all ranks."""
        keys: list[npt.NDArray[np.uint8]] = []
        if self._process.is_main:
            for path, _ in self._good_shards():
                keys.append(np.array(open_shard(path, self._fingerprint.id).keys))
        held: set[bytes] = set()
        for part in self._process.gather(keys)[0]:
            held.update(map(bytes, part))
        return held

    def _good_shards(self) -> Iterator[tuple[Path, ShardRecord]]:
        """Files that are whole and belong here; others are named, and set aside."""
        for path in sorted(self.folder.glob(PATTERN)):
            try:
                yield path, verify_shard(path, self._fingerprint.id)
            except CheckpointError as error:
                logger.warning("%s Set aside as %s.bad.", error, path.name)
                path.rename(path.with_name(path.name + ".bad"))


def _rows(keys: npt.NDArray[np.uint8], batch: PackedBatch, logprobs: Tensor) -> Rows:
    mask = batch.response_mask.numpy()
    before = np.concatenate([[0], np.cumsum(mask, dtype=np.int64)])
    return Rows(keys, before[batch.cu_seqlens.numpy()], logprobs.float().numpy()[mask])
