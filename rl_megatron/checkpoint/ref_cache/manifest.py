"""Which files of a cache count, and what they are good for. Written last, in one step."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rl_megatron.checkpoint.hf_files import read_json
from rl_megatron.checkpoint.publish import durable_file
from rl_megatron.checkpoint.ref_cache.fingerprint import Fingerprint
from rl_megatron.checkpoint.ref_cache.shard import ShardRecord
from rl_megatron.errors import CheckpointError
from rl_megatron.parallel.process import Process

MANIFEST_FILE = "manifest.json"


@dataclass(frozen=True)
class Manifest:
    """What manifest.json holds.

    Attributes:
        fingerprint: What the log-probs follow from.
        shards: The files that count.
        index: File with the places of all rows.
        about: For people: where model and data came from, and when. Never compared.
    """

    fingerprint: Fingerprint
    shards: tuple[ShardRecord, ...]
    index: str
    about: dict[str, Any]

    @property
    def num_rows(self) -> int:
        """Rows of all shards."""
        return sum(shard.rows for shard in self.shards)

    @property
    def num_tokens(self) -> int:
        """Response tokens of all shards."""
        return sum(shard.tokens for shard in self.shards)


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest; None where nothing counts yet.

    Raises:
        CheckpointError: It is broken, or of a format that is not known here.
    """
    path = folder / MANIFEST_FILE
    if not path.exists():
        return None
    data = read_json(path)
    try:
        return Manifest(
            fingerprint=Fingerprint(dict(data["fingerprint"])),
            shards=tuple(ShardRecord(**shard) for shard in data["shards"]),
            index=data["index"],
            about=dict(data["about"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} is no manifest of a reference cache ({error!r}). Remove the folder; the cache "
            "is then built again."
        ) from error


def agreed_manifest(folder: Path, process: Process) -> Manifest | None:
    """The manifest as rank 0 finds it, on all ranks. Collective.

    Another job may publish between the looks of two ranks, and ranks that see different caches no
    longer do the same.

    Raises:
        CheckpointError: As `read_manifest`, on all ranks.
    """
    return process.from_main(lambda: read_manifest(folder))


def check_fingerprint(manifest: Manifest | None, fingerprint: Fingerprint, folder: Path) -> None:
    """Refuse a cache of something else, naming every field that differs.

    Raises:
        CheckpointError: The manifest has another fingerprint.
    """
    differences = [] if manifest is None else manifest.fingerprint.differences(fingerprint)
    if differences:
        raise CheckpointError(
            f"The reference cache {folder} was made for something else, and is not used: "
            f"{'; '.join(differences)}. Name another reference.cache, or remove the folder."
        )


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Make the manifest durable, in the place of the one before."""
    data = {
        "fingerprint": manifest.fingerprint.fields,
        "fingerprint_id": manifest.fingerprint.id,
        "rows": manifest.num_rows,
        "response_tokens": manifest.num_tokens,
        "index": manifest.index,
        "about": manifest.about,
        "shards": [asdict(shard) for shard in manifest.shards],
    }
    with durable_file(folder / MANIFEST_FILE) as aside:
        aside.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
