"""The weights digest: one number for the weights of a model, however they are stored or split.

Each element adds to two sums modulo 2^64:

    digest = sum over tensors, rows i and columns j of  a(name, i) * k(j) * mix(bits of w[i, j])

with the bits those of the value in float32, `a` and `k` pseudo-random 64-bit numbers, and a term
for name and shape. A sum does not care who adds first, so every rank adds what it holds, nothing is
gathered, and one all-reduce of 16 bytes makes the digest: the same for a Megatron model on any
layout, for a sharded or whole transformers model, and for the Hugging Face files. For random
multipliers two different models agree by chance with a probability of about 2^-90 (multilinear
hashing, Carter and Wegman 1979); they are fixed, so this finds mistakes and not forgers.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, lru_cache
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from rl_megatron.checkpoint.hf_files import EMBEDDING, HEAD, HFWeights, read_json
from rl_megatron.checkpoint.naming import Placement, place
from rl_megatron.interfaces.weights import Split, WeightRule
from rl_megatron.kernels import native
from rl_megatron.parallel.process import Process

logger = logging.getLogger(__name__)

_LANES = 2
_GOLDEN = 0x9E3779B97F4A7C15
_BLOCK_ELEMENTS = 2**17
# Row numbers of the tensors that a rule joins are told apart by this many bits.
_ROW_BITS = 40


def model_digest(chunks: Iterable[nn.Module], rules: Sequence[WeightRule], process: Process) -> str:
    """Digest of a Megatron model. Collective; each rank reads its own shards only."""
    total = _Sum()
    for placement in place(chunks, rules, process):
        if _counts_here(placement, process):
            assert placement.parameter is not None
            _add_shard(total, placement, process)
    lanes = process.all_reduce(total.lanes)
    shapes = {
        name: shape
        for rule in rules
        if not rule.is_copy
        for name, shape in zip(rule.hf_names, rule.split.hf_shapes, strict=True)
    }
    return _finish(lanes, shapes)


def tensors_digest(weights: Iterable[tuple[str, Tensor]], process: Process | None = None) -> str:
    """Digest of whole tensors under their Hugging Face names, each given once.

    Args:
        weights: All of them.
        process: This rank, if all ranks are given the same tensors and share the work. Collective
            then.
    """
    first, step = _turn(process)
    total, shapes = _Sum(), {}
    for number, (name, tensor) in enumerate(weights):
        shapes[name] = tuple(tensor.shape)
        if number % step == first:
            total.add(_as_rows(tensor), _row_multipliers(name, tensor.shape[0]), slice(None))
    return _finish(_all_lanes(total, process), shapes)


def folder_digest(
    folder: Path, dtype: torch.dtype | None = None, process: Process | None = None
) -> str:
    """Digest of the weights in a Hugging Face folder; a tied head is the embedding, counted once.

    Args:
        folder: The folder.
        dtype: As a model of this dtype would hold them; None: as they are.
        process: This rank, if all ranks share the work. Collective then.

    Raises:
        CheckpointError: A file is missing or broken.
    """
    tied = read_json(folder / "config.json").get("tie_word_embeddings", False)
    total = _Sum()
    with HFWeights(folder) as files:
        names = sorted(files.names - ({HEAD} if tied and EMBEDDING in files.names else set()))
        first, step = _turn(process)
        for name in names[first::step]:
            tensor = files.read(name, (slice(None),)).to(dtype)
            total.add(_as_rows(tensor), _row_multipliers(name, tensor.shape[0]), slice(None))
        shapes = {name: files.record(name).shape for name in names}
    return _finish(_all_lanes(total, process), shapes)


def _turn(process: Process | None) -> tuple[int, int]:
    """Which tensors a rank adds: the first of them, and every how many."""
    return (0, 1) if process is None else (process.rank, process.layout.world_size)


class _Sum:
    """The two sums, on the host; what is added stays where it is."""

    def __init__(self) -> None:
        self.lanes = torch.zeros(_LANES, dtype=torch.int64)

    @torch.no_grad()
    def add(self, rows: Tensor, multipliers: Tensor, columns: slice) -> None:
        """Add rows [R, C], the part `columns` of theirs; multipliers [lanes, R], 0 to leave out."""
        weights = _column_multipliers(rows.shape[1], columns.start or 0)
        sums = _compiled_row_sums(rows, weights)
        if sums is None:
            sums = _row_sums(rows, weights)
        self.lanes += (sums.cpu() * multipliers).sum(dim=1)


def _all_lanes(total: _Sum, process: Process | None) -> Tensor:
    return total.lanes if process is None else process.all_reduce(total.lanes)


def _row_sums(rows: Tensor, weights: Tensor) -> Tensor:
    """[lanes, R] sums over the columns of the mixed bits times `weights` [lanes, C]."""
    weights = weights.to(rows.device)
    sums = torch.empty(_LANES, rows.shape[0], dtype=torch.int64, device=rows.device)
    height = max(1, _BLOCK_ELEMENTS // max(rows.shape[1], 1))
    for start in range(0, rows.shape[0], height):
        bits = _mixed_bits(rows[start : start + height])
        for lane in range(_LANES):
            sums[lane, start : start + height] = (bits * weights[lane]).sum(dim=1)
    return sums


def _mixed_bits(values: Tensor) -> Tensor:
    """The bits of each value in float32, high ones folded into low ones, as int64 below 2^32.

    bfloat16 leaves the low half 0: unfolded, all its terms would be multiples of 2^16.
    """
    bits = values.float().contiguous().view(torch.int32).long() & 0xFFFFFFFF
    return bits ^ (bits >> 16)


def _compiled_row_sums(rows: Tensor, weights: Tensor) -> Tensor | None:
    """The same, ten times as fast; None without a compiler, or where the rows are not on a CPU."""
    library = _library()
    kernels = {torch.float32: "rl_digest_float32", torch.bfloat16: "rl_digest_bfloat16"}
    if library is None or rows.device.type != "cpu" or rows.dtype not in kernels:
        return None
    rows, weights = rows.contiguous(), weights.contiguous()
    sums = torch.empty(_LANES, rows.shape[0], dtype=torch.int64)
    getattr(library, kernels[rows.dtype])(
        ctypes.c_void_p(rows.data_ptr()),
        ctypes.c_int64(rows.shape[0]),
        ctypes.c_int64(rows.shape[1]),
        ctypes.c_void_p(weights.data_ptr()),
        ctypes.c_void_p(sums.data_ptr()),
        ctypes.c_int32(torch.get_num_threads()),
    )
    return sums


@cache
def _library() -> ctypes.CDLL | None:
    try:
        return native.load(Path(__file__).parent / "csrc" / "digest.cpp")
    except native.NativeError as error:
        logger.info("the weights digest is computed by torch, which is slower: %s", error)
        return None


def _as_rows(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(tensor.shape[0], -1)


def _add_shard(total: _Sum, placement: Placement, process: Process) -> None:
    rule, parameter = placement.rule, placement.parameter
    assert parameter is not None
    size = process.layout.tensor
    numbers, columns = _row_numbers(rule.split, process.tensor_rank, size)
    if process.tensor_rank > 0:
        first_numbers, first_columns = _row_numbers(rule.split, 0, size)
        if torch.equal(numbers, first_numbers) and columns == first_columns:
            return  # Every tensor-parallel rank holds the same, and the first has added it.
    multipliers = torch.zeros(_LANES, len(numbers), dtype=torch.int64)
    for index, (name, shape) in enumerate(zip(rule.hf_names, rule.split.hf_shapes, strict=True)):
        theirs = numbers >> _ROW_BITS == index + 1
        of_name = _row_multipliers(name, shape[0])
        multipliers[:, theirs] = of_name[:, numbers[theirs] & (2**_ROW_BITS - 1)]
    total.add(_as_rows(parameter), multipliers, columns)


def _row_numbers(split: Split, tensor_rank: int, size: int) -> tuple[Tensor, slice]:
    """Which tensor and row each row of a rank's shard is, 0 for padding; and which columns.

    The split itself says so: it cuts row numbers just as it would cut the rows.
    """
    columns = slice(None)

    def read(index: int, slices: tuple[slice, ...]) -> Tensor:
        nonlocal columns
        columns = slices[1] if len(slices) > 1 else slice(None)
        rows = torch.arange(split.hf_shapes[index][0])[slices[0]]
        return rows[:, None] + ((index + 1) << _ROW_BITS)

    return split.shard(read, tensor_rank, size)[:, 0], columns


def _counts_here(placement: Placement, process: Process) -> bool:
    """Whether this rank adds its shard: of the replicas that hold the same, the first."""
    if placement.rule.is_copy or placement.stage != process.stage or placement.parameter is None:
        return False
    return process.replica_rank == (placement.expert_rank or 0)


def _finish(lanes: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """The digest as 32 hexadecimal digits."""
    total = [int(lane) for lane in lanes]
    for name, shape in shapes.items():
        for lane in range(_LANES):
            total[lane] += _key(f"{name} {list(shape)}", lane)
    return "".join(f"{lane % 2**64:016x}" for lane in total)


def _key(text: str, lane: int) -> int:
    return int.from_bytes(blake2b(f"{lane} {text}".encode(), digest_size=8).digest(), "little")


def _numbers(text: str, start: int, count: int) -> Tensor:
    """[lanes, count] pseudo-random int64: SplitMix64 of a key of the text and a counter."""
    counter = np.arange(start, start + count, dtype=np.uint64) * np.uint64(_GOLDEN)
    lanes = []
    for lane in range(_LANES):
        x = counter + np.uint64(_key(text, lane))
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        lanes.append((x ^ (x >> np.uint64(31))).view(np.int64))
    return torch.from_numpy(np.stack(lanes))


def _row_multipliers(name: str, num_rows: int) -> Tensor:
    """`a` of all rows of a tensor; odd, so that no row is weakened."""
    return _numbers(name, 0, num_rows) | 1


@lru_cache(maxsize=16)
def _column_multipliers(count: int, start: int) -> Tensor:
    """`k` of the columns from `start`."""
    return _numbers("columns", start, count)
