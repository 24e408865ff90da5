"""Weights of data-parallel ranks as Hugging Face files, each rank writing its share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from rl_megatron.checkpoint.hf_files import file_name, write_index
from rl_megatron.parallel.process import Process


def save_hf_shards(folder: Path, weights: Iterator[tuple[str, Tensor]], process: Process) -> None:
    """Write weights into a folder that becomes a Hugging Face model's. Collective.

    Args:
        folder: Where to; the same for all ranks.
        weights: Whole, under their names in files, drawn by every rank.
        process: This rank.
    """
    ranks = process.layout.world_size
    sizes = [0] * ranks
    mine: dict[str, Tensor] = {}
    files: dict[str, str] = {}
    for name, tensor in weights:
        rank = sizes.index(min(sizes))
        sizes[rank] += tensor.nbytes
        files[name] = file_name(rank, ranks)
        if rank == process.rank:
            mine[name] = tensor.to("cpu", copy=True).contiguous()
    path = folder / file_name(process.rank, ranks)
    save_file(mine, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors makes it readable by its owner alone.
    if process.is_main and ranks > 1:
        write_index(folder, files, sum(sizes))
