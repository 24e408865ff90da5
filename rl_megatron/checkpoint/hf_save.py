"""A Megatron model as Hugging Face weights: one tensor at a time, under any layout."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from rl_megatron.checkpoint.hf_files import (
    EMBEDDING,
    HEAD,
    TensorRecord,
    copy_side_files,
    file_name,
    read_json,
    read_records,
    write_index,
)
from rl_megatron.checkpoint.naming import Placement, place
from rl_megatron.checkpoint.publish import new_folder
from rl_megatron.errors import CheckpointError
from rl_megatron.interfaces.weights import WeightRule
from rl_megatron.parallel.process import Process

MAX_FILE_BYTES = 5 * 10**9


def iter_hf_weights(
    chunks: Iterable[nn.Module], rules: Sequence[WeightRule], process: Process
) -> Iterator[tuple[str, Tensor]]:
    """Every weight under its Hugging Face name, whole, on every rank's device, one at a time.

    Collective: all ranks must draw all weights. The order is that of `rules`: embedding, layer by
    layer, final norm, head (if it is not tied). Padded rows of the vocabulary are left out.

    A tensor may be the live parameter itself: copy it to keep it past the next optimiser step.
    """
    for placement in place(chunks, rules, process):
        if not placement.rule.is_copy:
            yield from zip(placement.rule.hf_names, _whole(placement, process), strict=True)


@torch.no_grad()
def _whole(placement: Placement, process: Process) -> tuple[Tensor, ...]:
    """The HF tensors of one rule: joined over tensor ranks, then sent to those without them."""
    split = placement.rule.split
    here = process.stage == placement.stage
    if here and placement.expert_rank in (None, process.expert_rank):
        assert placement.parameter is not None
        tensors = split.join(_gather(placement.parameter.detach(), process))
    else:
        tensors = tuple(
            torch.empty(shape, dtype=placement.dtype, device=process.device)
            for shape in split.hf_shapes
        )
    for tensor in tensors:
        if here and placement.expert_rank is not None:
            dist.broadcast(tensor, group=process.expert_group, group_src=placement.expert_rank)
        if process.layout.pipeline > 1:
            dist.broadcast(tensor, group=process.pipeline_group, group_src=placement.stage)
    return tensors


def _gather(shard: Tensor, process: Process) -> list[Tensor]:
    """The shards of all tensor-parallel ranks, in rank order."""
    if process.layout.tensor == 1:
        return [shard]
    shards = [torch.empty_like(shard) for _ in range(process.layout.tensor)]
    dist.all_gather(shards, shard.contiguous(), group=process.tensor_group)
    return shards


def save_hf(
    folder: Path,
    weights: Iterator[tuple[str, Tensor]],
    source: Path,
    process: Process,
    *,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    replace: bool = False,
) -> None:
    """Write a HF model folder that appears whole or not at all. Collective.

    Each tensor gets the dtype it has in the source, and a tied head is written if the source has
    one; so unchanged weights come back bit by bit. config.json and the tokenizer's files are the
    source's, byte by byte; only with `dtype` is config.json's dtype set to it.

    Args:
        folder: Where to write.
        weights: `iter_hf_weights`, drawn by every rank.
        source: HF folder, or `hf` folder of a Megatron checkpoint, that the model came from.
        process: This rank.
        dtype: For all tensors, instead of the source's.
        max_file_bytes: Further safetensors files are begun at this size.
        replace: Whether an existing folder may be removed.

    Raises:
        CheckpointError: The folder exists, or the weights are not those of the source by name
            and shape.
    """
    records = read_records(source)
    names_of = {name: (name,) for name in records}
    if HEAD in records and read_json(source / "config.json").get("tie_word_embeddings", False):
        names_of[EMBEDDING] = (EMBEDDING, HEAD)
    with new_folder(folder, process, replace=replace) as aside:
        writer = _FileWriter(aside, max_file_bytes) if process.is_main else None
        written: set[str] = set()
        for name, tensor in weights:
            for target in names_of.get(name, (name,)):
                _check(target, tensor, records, source)
                written.add(target)
                if writer is not None:
                    writer.add(target, tensor, dtype or records[target].dtype)
        if missing := sorted(set(records) - written):
            raise CheckpointError(f"{source} names weights that the model lacks: {missing}.")
        if writer is not None:
            writer.finish()
            copy_side_files(source, aside)
            if dtype is not None:
                _set_dtype(aside / "config.json", dtype)


def _check(name: str, tensor: Tensor, records: Mapping[str, TensorRecord], source: Path) -> None:
    found, record = tuple(tensor.shape), records.get(name)
    if record is None or record.shape != found:
        expected = "no such tensor" if record is None else str(list(record.shape))
        raise CheckpointError(
            f"The model has {name} of shape {list(found)}, {source} has {expected}. "
            "Export with the folder that the model was loaded from."
        )


def _set_dtype(path: Path, dtype: torch.dtype) -> None:
    """Change what config.json says of the weights, under the name it uses (old or new)."""
    config = read_json(path)
    key = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
    config[key] = str(dtype).removeprefix("torch.")
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


class _FileWriter:
    """Gathers tensors into files of limited size; names them once their number is known."""

    def __init__(self, folder: Path, max_file_bytes: int) -> None:
        self._folder = folder
        self._max_file_bytes = max_file_bytes
        self._waiting: dict[str, Tensor] = {}
        self._waiting_bytes = 0
        self._files: list[list[str]] = []
        self._total_bytes = 0

    def add(self, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
        """Take a tensor; the files before it are written once they are full."""
        size = tensor.numel() * dtype.itemsize
        if self._waiting and self._waiting_bytes + size > self._max_file_bytes:
            self._write()
        self._waiting[name] = tensor.to("cpu", dtype, copy=True).contiguous()
        self._waiting_bytes += size

    def finish(self) -> None:
        """Write the rest, give the files their names, and an index if there are several."""
        self._write()
        count = len(self._files)
        weight_map = {}
        for number, names in enumerate(self._files):
            file = file_name(number, count)
            (self._folder / f"{number}.part").rename(self._folder / file)
            weight_map.update(dict.fromkeys(names, file))
        if count > 1:
            write_index(self._folder, weight_map, self._total_bytes)

    def _write(self) -> None:
        part = self._folder / f"{len(self._files)}.part"
        self._files.append(list(self._waiting))
        save_file(self._waiting, part, metadata={"format": "pt"})
        part.chmod(0o644)  # safetensors makes it readable by its owner alone.
        self._total_bytes += self._waiting_bytes
        self._waiting = {}
        self._waiting_bytes = 0
