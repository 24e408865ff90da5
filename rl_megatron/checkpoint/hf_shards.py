"""Weights of data-parallel ranks as Hugging Face files, each rank writing its share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from rl_megatron.checkpoint.hf_files import file_name, write_index
from rl_megatron.parallel.process import Process


class WrittenShards:
    """A part of a checkpoint (see `Part`): a folder becomes a Hugging Face model's.

    Args:
        folder: Where to; the same for all ranks.
        weights: Whole, under their names in files, drawn by every rank. Collective.
        process: This rank.
    """

    reads_live = False

    def __init__(
        self, folder: Path, weights: Iterator[tuple[str, Tensor]], process: Process
    ) -> None:
        ranks = process.layout.world_size
        self._sizes = [0] * ranks
        self._mine: dict[str, Tensor] = {}
        self._holders: dict[str, str] = {}
        for name, tensor in weights:
            rank = self._sizes.index(min(self._sizes))
            self._sizes[rank] += tensor.nbytes
            self._holders[name] = file_name(rank, ranks)
            if rank == process.rank:
                self._mine[name] = tensor.to("cpu", copy=True).contiguous()
        self._folder = folder
        self._writes_index = process.is_main and ranks > 1
        self.files = [folder / file_name(process.rank, ranks)]

    def write(self) -> None:
        """Write this rank's file; raises OSError where it cannot."""
        (path,) = self.files
        try:
            save_file(self._mine, path, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"{path}: {error}") from error
        path.chmod(0o644)  # safetensors makes it readable by its owner alone.

    def finish(self, written: None) -> None:
        """Say which file holds what, now that all are there."""
        del written
        if self._writes_index:
            write_index(self._folder, self._holders, sum(self._sizes))
