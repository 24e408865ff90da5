"""The optimizer's state on disk: each rank writes the pieces it holds, a reader puts them together.

A rank writes one safetensors file, with no word to the others and without a copy of anything. What
is read may be cut in any other way: by more or fewer ranks, or shard by shard as a whole.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rl_megatron.errors import CheckpointError
from rl_megatron.parallel.process import Process

_FILE = re.compile(r"^optimizer-(\d{5})-of-(\d{5})\.safetensors$")
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_PIECES, _METADATA = "pieces", "metadata"


@dataclass(frozen=True)
class Piece:
    """A flat part of one shard of one parameter.

    Attributes:
        name: The parameter's, the same under every layout.
        shape: Of the shard.
        start: First element of the flattened shard.
        tensors: "main", "exp_avg", "exp_avg_sq" or what else there is: each [n], the live tensor.
        shard: Which tensor-parallel shard.
        num_shards: Of how many.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    tensors: Mapping[str, Tensor]
    shard: int = 0
    num_shards: int = 1


class WrittenPieces:
    """The pieces of one rank as they are now, to be written; a `Part` of a checkpoint.

    Views of the live tensors: what is written in the background may not change before all has been
    read, see `save_parts`. Only what lies on a GPU is copied to the host.

    Args:
        folder: Where to; the same for all ranks.
        process: This rank.
        pieces: What it holds. Together the ranks hold each element once.
        metadata: Said of the whole, the same on all ranks, e.g. {"step": "12"}.
    """

    def __init__(
        self,
        folder: Path,
        process: Process,
        pieces: Sequence[Piece],
        metadata: Mapping[str, str],
    ) -> None:
        self.files = [folder / _file_name(process.rank, process.layout.world_size)]
        tensors = [tensor for piece in pieces for tensor in piece.tensors.values()]
        self.reads_live = any(tensor.device.type == "cpu" for tensor in tensors)
        records = []
        entries: dict[str, Any] = {}
        self._views: list[memoryview] = []
        end = 0
        for piece in pieces:
            length = _length(piece)
            place = piece.start, piece.start + length, piece.shard, piece.num_shards
            records.append((piece.name, piece.shape, *place, sorted(piece.tensors)))
            for field, tensor in piece.tensors.items():
                view = _bytes_of(tensor)
                key = _key(piece.name, field, piece.shard, piece.start)
                assert key not in entries, f"{key} is given twice"
                entries[key] = {
                    "dtype": _DTYPES[tensor.dtype],
                    "shape": [length],
                    "data_offsets": [end, end + view.nbytes],
                }
                end += view.nbytes
                self._views.append(view)
        said = {_PIECES: json.dumps(records), _METADATA: json.dumps(dict(metadata))}
        text = json.dumps({"__metadata__": said, **entries}).encode()
        # The format wants 8 bytes that say how long the header is, and data that begin at a
        # multiple of 8.
        text += b" " * (-len(text) % 8)
        self._header = len(text).to_bytes(8, "little") + text

    def write(self) -> None:
        """Write a safetensors file. safetensors itself would first make a copy of everything."""
        with self.files[0].open("wb") as file:
            file.write(self._header)
            for view in self._views:
                file.write(view)
        self._views = []

    def finish(self, written: None) -> None:
        """Nothing is left to do."""


class PieceFiles:
    """The pieces of all ranks in one folder, read range by range. Use as a context manager.

    Args:
        folder: Where the ranks wrote their `WrittenPieces`.

    Attributes:
        metadata: What was said of the whole.

    Raises:
        CheckpointError: The file of a rank is missing or broken, or belongs to another save.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: list[Any] = []
        self._parts: dict[tuple[str, str, int], list[_Part]] = defaultdict(list)
        self._shapes: dict[tuple[str, int], tuple[int, ...]] = {}
        self._num_shards: dict[str, int] = {}
        found = [self._open(path) for path in _all_files(folder)]
        self.metadata: Mapping[str, str] = found[0]
        if any(metadata != self.metadata for metadata in found):
            raise self._mixed(f"its files say {found}")
        for parts in self._parts.values():
            parts.sort(key=lambda part: part.start)

    def __enter__(self) -> PieceFiles:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for file in self._files:
            file.__exit__(kind, error, trace)

    def num_shards(self, name: str) -> int:
        """How many tensor-parallel shards a parameter was saved in.

        Raises:
            CheckpointError: No such parameter.
        """
        if name not in self._num_shards:
            raise CheckpointError(
                f"{self._folder} holds no optimizer state of {name}. Was it saved by another model?"
            )
        return self._num_shards[name]

    def shape(self, name: str, shard: int) -> tuple[int, ...]:
        """Shape of a shard.

        Raises:
            CheckpointError: It was not saved.
        """
        count = self.num_shards(name)
        assert 0 <= shard < count, f"shard {shard} of {count} of {name}"
        if (name, shard) not in self._shapes:
            raise self._gap(f"shard {shard} of {name}")
        return self._shapes[name, shard]

    def fill(self, piece: Piece) -> None:
        """Read into the tensors of `piece`, whose shards are those that were saved.

        Raises:
            CheckpointError: It was not saved, not all of it, or in another shape.
        """
        saved = self.shape(piece.name, piece.shard), self.num_shards(piece.name)
        if saved != (piece.shape, piece.num_shards):
            raise CheckpointError(
                f"{self._folder} holds the optimizer state of {piece.name} as {saved[1]} shards of "
                f"{list(saved[0])}, the model has {piece.num_shards} of {list(piece.shape)}. "
                "Resume the model that was saved."
            )
        for field, tensor in piece.tensors.items():
            self._read(piece.name, field, piece.shard, piece.start, tensor)

    def shard(self, name: str, field: str, shard: int) -> Tensor:
        """A whole shard, on the host, in the dtype of the file.

        Raises:
            CheckpointError: It was not saved, or not all of it.
        """
        shape = self.shape(name, shard)
        dtype = self._find(name, field, shard)[0].dtype
        tensor = torch.empty(math.prod(shape), dtype=dtype)
        self._read(name, field, shard, 0, tensor)
        return tensor.view(shape)

    def _open(self, path: Path) -> dict[str, str]:
        """Note what a file holds; what it says of the whole."""
        try:
            file = safe_open(path, framework="pt", device="cpu")
            header = file.metadata()
            pieces, metadata = json.loads(header[_PIECES]), json.loads(header[_METADATA])
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{path} is not a complete file of optimizer state ({error}). Copy it again, or "
                "resume from another checkpoint."
            ) from error
        self._files.append(file)
        for name, shape, start, stop, shard, num_shards, fields in pieces:
            known = self._shapes.setdefault((name, shard), tuple(shape))
            if known != tuple(shape) or self._num_shards.setdefault(name, num_shards) != num_shards:
                raise self._mixed(f"it holds {name} in two shapes")
            for field in fields:
                part = _Part(file, _key(name, field, shard, start), start, stop)
                self._parts[name, field, shard].append(part)
        return dict(metadata)

    def _find(self, name: str, field: str, shard: int) -> list[_Part]:
        parts = self._parts.get((name, field, shard))
        if parts is None:
            raise self._gap(f"{field} of {name}, shard {shard}")
        return parts

    def _read(self, name: str, field: str, shard: int, start: int, target: Tensor) -> None:
        """Fill `target` with the elements from `start` on."""
        position, stop = start, start + target.numel()
        for part in self._find(name, field, shard):
            end = min(stop, part.stop)
            if part.start <= position < end:
                target[position - start : end - start].copy_(part.read(position, end))
                position = end
        if position < stop:
            raise self._gap(f"element {position} of {field} of {name}, shard {shard}")

    def _gap(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self._folder}: no rank wrote {what}. Was it saved by another model? Resume the one "
            "that was saved, or from another checkpoint."
        )

    def _mixed(self, why: str) -> CheckpointError:
        return CheckpointError(
            f"{self._folder} mixes files of several saves: {why}. Copy the checkpoint again into "
            "an empty folder."
        )


@dataclass(frozen=True)
class _Part:
    """Elements [start, stop) of a shard, in an open file."""

    file: Any
    key: str
    start: int
    stop: int

    @property
    def dtype(self) -> torch.dtype:
        name = self.file.get_slice(self.key).get_dtype()
        return next(dtype for dtype, known in _DTYPES.items() if known == name)

    def read(self, start: int, stop: int) -> Tensor:
        part: Tensor = self.file.get_slice(self.key)[start - self.start : stop - self.start]
        return part


def _length(piece: Piece) -> int:
    lengths = {tensor.numel() for tensor in piece.tensors.values()}
    assert len(lengths) == 1, f"{piece.name}: tensors of lengths {lengths}"
    (length,) = lengths
    whole = math.prod(piece.shape)
    assert piece.start >= 0 and piece.start + length <= whole, f"{piece.name} is out of its shard"
    return length


def _bytes_of(tensor: Tensor) -> memoryview:
    assert tensor.dim() == 1 and tensor.is_contiguous(), "a piece is flat"
    return memoryview(tensor.detach().cpu().view(torch.uint8).numpy())


def _key(name: str, field: str, shard: int, start: int) -> str:
    return f"{name}/{field}/{shard}/{start}"


def _file_name(rank: int, world_size: int) -> str:
    return f"optimizer-{rank:05d}-of-{world_size:05d}.safetensors"


def _all_files(folder: Path) -> Iterator[Path]:
    """The files of all ranks of one save."""
    found = [match for path in sorted(folder.glob("*")) if (match := _FILE.match(path.name))]
    counts = {int(match[2]) for match in found}
    if not found:
        raise CheckpointError(
            f"{folder} holds no optimizer state ({_file_name(0, 1)} or others like it). Copy the "
            "checkpoint again, or resume from another one."
        )
    if len(counts) > 1:
        raise CheckpointError(
            f"{folder} mixes files of several saves: of {sorted(counts)} ranks. Copy the "
            "checkpoint again into an empty folder."
        )
    (count,) = counts
    held = {int(match[1]) for match in found}
    missing = [_file_name(rank, count) for rank in range(count) if rank not in held]
    if missing:
        shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise CheckpointError(f"{folder} lacks {shown}. Copy the checkpoint again.")
    return (folder / _file_name(rank, count) for rank in range(count))
