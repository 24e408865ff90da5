"""The files of a cache as such: are they whole, and which of them are left over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rl_megatron.checkpoint.ref_cache.index import open_index
from rl_megatron.checkpoint.ref_cache.manifest import MANIFEST_FILE, read_manifest
from rl_megatron.checkpoint.ref_cache.shard import verify_shard
from rl_megatron.errors import CheckpointError


def verify_files(folder: Path) -> Iterator[str]:
    """What is wrong with each file that counts; nothing if all are what was written.

    Raises:
        CheckpointError: There is no manifest, or it is broken.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        raise CheckpointError(f"There is no reference cache in {folder}: no {MANIFEST_FILE}.")
    for shard in manifest.shards:
        try:
            verify_shard(folder / shard.file, manifest.fingerprint.id, shard)
        except CheckpointError as error:
            yield str(error)
    try:
        open_index(folder / manifest.index)
    except CheckpointError as error:
        yield str(error)


def clean(folder: Path, delete: bool) -> list[Path]:
    """Files of a cache that do not count: of killed writers, set aside, or of an older index.

    Not while a build runs: its shards count only at its end.

    Args:
        folder: A cache.
        delete: Whether they are removed.
    """
    manifest = read_manifest(folder)
    counted = {MANIFEST_FILE}
    if manifest is not None:
        counted |= {manifest.index, *(shard.file for shard in manifest.shards)}
    left_over = sorted(path for path in folder.iterdir() if path.name not in counted)
    if delete:
        for path in left_over:
            path.unlink()
        if manifest is None:
            folder.rmdir()
    return left_over
