"""Reference log-probs from a cache: found, completed and checked before the first step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_megatron.checkpoint.digest import folder_digest, model_digest, tensors_digest
from rl_megatron.checkpoint.folders import resolve_model_folder
from rl_megatron.checkpoint.ref_cache import (
    Fingerprint,
    RefCache,
    RefCacheWriter,
    agreed_manifest,
    check_fingerprint,
    make_fingerprint,
)
from rl_megatron.config.preference_runs import ReferencedRun
from rl_megatron.data.packing import MicroBatching
from rl_megatron.errors import CheckpointError, NumericsError
from rl_megatron.interfaces.batch import PackedBatch
from rl_megatron.interfaces.protocols import PolicyBackend
from rl_megatron.metrics.progress import RunProgress
from rl_megatron.models.families import read_shape
from rl_megatron.models.outline import read_outline
from rl_megatron.models.shape import ModelOutline, ModelShape
from rl_megatron.parallel.process import Process
from rl_megatron.runtime.build import build_policy
from rl_megatron.runtime.stopping import leave_if_asked

DEFAULT_ROOT = Path("runs/ref_cache")
# A row computed twice, in other company: what two orders of adding up make of it.
_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.25}

logger = logging.getLogger(__name__)


class CachedReference:
    """The `Scorer` protocol on an open cache."""

    def __init__(self, cache: RefCache) -> None:
        self.cache = cache

    def logprobs(self, batch: PackedBatch) -> Tensor:
        """As computed by the reference; see `Scorer`."""
        return self.cache.logprobs(batch)

    def close(self) -> None:
        """Nothing is held but mapped files."""


@dataclass
class LazyScorer:
    """The reference, built when it is first needed.

    Attributes:
        build: Makes the frozen model.
        borrowed: Whether it is the policy before its first step, which stays.
    """

    build: Callable[[], PolicyBackend]
    borrowed: bool
    model: PolicyBackend | None = None

    def get(self) -> PolicyBackend:
        """The model."""
        if self.model is None:
            self.model = self.build()
        return self.model

    def release(self) -> None:
        """Let go of it, if it is only there for the cache."""
        if self.model is not None and not self.borrowed:
            self.model.close()
        self.model = None


def reference_scorer(
    run: ReferencedRun,
    process: Process,
    micro_batching: MicroBatching,
    policy: PolicyBackend | None = None,
) -> LazyScorer:
    """The run's reference: the untrained `policy` itself where that is the same model."""
    path = run.reference.path or run.model.path
    if policy is not None and path == run.model.path:
        return LazyScorer(lambda: policy, borrowed=True)
    return LazyScorer(
        lambda: build_policy(run, process, micro_batching, path, trained=False), borrowed=False
    )


def cached_reference(
    run: ReferencedRun,
    process: Process,
    scorer: LazyScorer,
    chunks: Callable[[], Iterator[PackedBatch]],
) -> CachedReference:
    """The cache of the run's reference, holding every row of `chunks`. Collective.

    Args:
        run: The configuration.
        process: This rank.
        scorer: The reference, before anything was trained.
        chunks: All rows, in any order, a moderate number at a time; called more than once.

    Raises:
        CheckpointError: The cache is damaged, was made for something else, or lacks rows that
            may not be computed.
        NumericsError: Rows computed again are others.
    """
    fingerprint = _fingerprint(run, process, scorer)
    folder = cache_folder(run, fingerprint)
    may_build = run.reference.build_cache
    cache = None
    if agreed_manifest(folder, process) is not None or not may_build:
        cache = RefCache.open(folder, fingerprint, process)
    if cache is None or any(cache.missing(chunk) for chunk in chunks()):
        if not may_build:
            raise CheckpointError(
                f"The reference cache {folder} lacks rows of the data, and reference.build_cache "
                "is false. Run tools/ref_cache.py build with this config, or set it to true."
            )
        cache = _build(folder, fingerprint, run, process, scorer, chunks)
    return CachedReference(_checked(run, cache, scorer, chunks))


def complete_cache(
    run: ReferencedRun,
    process: Process,
    scorer: LazyScorer,
    chunks: Callable[[], Iterator[PackedBatch]],
) -> RefCache:
    """The same before a run: damaged shards are set aside, and their rows computed. Collective.

    Raises:
        CheckpointError: The folder holds the log-probs of something else.
        NumericsError: Rows computed again are others.
    """
    fingerprint = _fingerprint(run, process, scorer)
    folder = cache_folder(run, fingerprint)
    check_fingerprint(agreed_manifest(folder, process), fingerprint, folder)
    cache = _build(folder, fingerprint, run, process, scorer, chunks)
    return _checked(run, cache, scorer, chunks)


def cache_folder(run: ReferencedRun, fingerprint: Fingerprint) -> Path:
    """Where the cache of a run is."""
    if run.reference.cache is not None:
        return Path(run.reference.cache)
    return DEFAULT_ROOT / fingerprint.id


def _build(
    folder: Path,
    fingerprint: Fingerprint,
    run: ReferencedRun,
    process: Process,
    scorer: LazyScorer,
    chunks: Callable[[], Iterator[PackedBatch]],
) -> RefCache:
    """Compute the rows that the cache lacks, those of a killed build being kept. Collective.

    Raises:
        Requeue: The job is to leave; the rows computed so far are kept.
    """
    writer = RefCacheWriter(folder, fingerprint, process)
    total = sum(1 for _ in chunks())
    start, computed = time.monotonic(), 0
    progress = RunProgress(
        "reference log-probs", total, process.rank, {}, log_interval=max(1, total // 10)
    )
    try:
        with progress:
            for number, chunk in enumerate(chunks(), start=1):
                rows = writer.missing(chunk)
                if rows:
                    part = chunk.select(rows).with_fields(paired=False)
                    writer.add(part, scorer.get().logprobs(part))
                    computed += part.num_tokens
                progress.update(number, {})
                leave_if_asked(process)
    finally:
        writer.finish_writing()
    seconds = time.monotonic() - start
    writer.publish(
        {
            "model": run.reference.path or run.model.path,
            "data": run.data.train.path,
            "seconds_per_token": seconds / max(computed, 1),
        }
    )
    return RefCache.open(folder, fingerprint, process)


def _checked(
    run: ReferencedRun,
    cache: RefCache,
    scorer: LazyScorer,
    chunks: Callable[[], Iterator[PackedBatch]],
) -> RefCache:
    """The cache, a few rows of it computed again; the reference is let go of. Collective."""
    _verify_rows(run, cache, scorer, chunks)
    _tell(cache)
    scorer.release()
    return cache


def _verify_rows(
    run: ReferencedRun,
    cache: RefCache,
    scorer: LazyScorer,
    chunks: Callable[[], Iterator[PackedBatch]],
) -> None:
    """Compute a few rows of the first chunk again and compare. Collective.

    Raises:
        NumericsError: They are not what the cache holds.
    """
    if run.reference.verify_rows == 0:
        return
    first = next(chunks())
    generator = torch.Generator().manual_seed(run.seed)
    count = min(run.reference.verify_rows, first.num_sequences)
    rows = torch.randperm(first.num_sequences, generator=generator)[:count].tolist()
    part = first.select(rows).with_fields(paired=False)
    difference = (scorer.get().logprobs(part) - cache.logprobs(part)).abs().max()
    tolerance = _TOLERANCE[run.model.dtype]
    if not float(difference) <= tolerance:
        raise NumericsError(
            f"{count} rows of the reference cache {cache.folder} were computed again, and a "
            f"log-prob is {float(difference):.3g} off (at most {tolerance}). The cache is not of "
            "this model: remove the folder, and look for what changed beside its weights."
        )


def _fingerprint(run: ReferencedRun, process: Process, scorer: LazyScorer) -> Fingerprint:
    source = resolve_model_folder(
        Path(run.reference.path or run.model.path),
        "reference.path" if run.reference.path else "model.path",
    )
    shape = _numbers(source.hf)
    # Files may name their weights otherwise than transformers writes them, outside our families.
    named_by_us = isinstance(shape, ModelShape) and source.megatron is None
    if scorer.borrowed or not named_by_us:
        digest = backend_digest(scorer.get(), process)
    else:
        digest = folder_digest(source.hf, getattr(torch, run.model.dtype), process)
    return make_fingerprint(digest, shape, run.model.dtype)


def _numbers(hf_folder: Path) -> ModelShape | ModelOutline:
    """Those that all backends have in common, where Megatron can build the model too."""
    try:
        return read_shape(hf_folder)
    except CheckpointError:
        return read_outline(hf_folder)


def backend_digest(backend: PolicyBackend, process: Process) -> str:
    """The weights digest of a model that a backend holds. Collective."""
    from rl_megatron.backends.transformers_backend import TransformersBackend

    if isinstance(backend, TransformersBackend):
        return tensors_digest(backend.named_weights(), process)
    held: Any = backend
    return model_digest(held.chunks, held.rules, process)


def _tell(cache: RefCache) -> None:
    manifest = cache.manifest
    logger.info(
        "reference log-probs of %s rows (%s response tokens) from %s: no reference is held, and "
        "%.3g s per 1,000 tokens of a step are saved",
        f"{manifest.num_rows:,}",
        f"{manifest.num_tokens:,}",
        cache.folder,
        1000 * manifest.about.get("seconds_per_token", 0.0),
    )
