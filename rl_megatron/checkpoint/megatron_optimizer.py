"""The state of Megatron's optimizers in pieces: written as it lies, read under any layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rl_megatron.checkpoint.naming import global_parameters
from rl_megatron.checkpoint.pieces import Piece, PieceFiles, WrittenPieces
from rl_megatron.interfaces.weights import WeightRule
from rl_megatron.parallel import watchdog
from rl_megatron.parallel.process import Process

_MOMENTS = ("exp_avg", "exp_avg_sq")
_MAIN, _STEP = "main", "step"


def optimizer_pieces(
    folder: Path,
    chunks: Sequence[nn.Module],
    rules: Sequence[WeightRule],
    optimizer: Any,
    process: Process,
) -> WrittenPieces:
    """The state of now, to be written: Adam's moments, and main weights that the model rounds.

    Collective. Each element is written by one rank: that which updates it, or in equal shares where
    all replicas update everything.

    Args:
        folder: Where to.
        chunks: This rank's part of the model.
        rules: All weights of the model.
        optimizer: Megatron's.
        process: This rank.
    """
    _make_state(optimizer)
    held = _held(chunks, rules, optimizer, process)
    pieces = [_own_part(kept, process) for kept in held if not kept.rule.is_copy]
    # Where there are fewer elements than ranks some have no state, and so no number of steps.
    step = int(process.all_reduce(torch.tensor(_step(optimizer)), torch.distributed.ReduceOp.MAX))
    return WrittenPieces(folder, process, pieces, {_STEP: str(step)})


def load_optimizer(
    folder: Path,
    chunks: Sequence[nn.Module],
    rules: Sequence[WeightRule],
    optimizer: Any,
    process: Process,
) -> None:
    """Fill the optimizer's state from what `optimizer_pieces` wrote, under any layout.

    Args:
        folder: The checkpoint.
        chunks, rules, optimizer, process: As in `optimizer_pieces`.

    Raises:
        CheckpointError: A file that is missing or broken, or the state of another model.
    """
    _make_state(optimizer)
    with PieceFiles(folder) as files:
        for kept in _held(chunks, rules, optimizer, process):
            watchdog.beat()
            piece = kept.piece
            saved = files.num_shards(piece.name), files.shape(piece.name, 0)
            if saved == (piece.num_shards, piece.shape):
                files.fill(piece)
            else:
                _fill_resharded(piece, files, kept.rule)
        _set_step(optimizer, int(files.metadata[_STEP]))


@dataclass(frozen=True)
class _Held:
    """What this rank's optimizer keeps of one weight.

    Attributes:
        rule: The weight.
        parameter: Its shard in the model.
        piece: The state.
        is_shared: Whether all replicas keep the same.
    """

    rule: WeightRule
    parameter: Tensor
    piece: Piece
    is_shared: bool


def _held(
    chunks: Sequence[nn.Module], rules: Sequence[WeightRule], optimizer: Any, process: Process
) -> Iterator[_Held]:
    parameters = global_parameters(chunks)
    rule_of = {rule.megatron_name: rule for rule in rules}
    found = {id(value): rule_of[name] for name, value in parameters.items()}
    # A second home of a weight has the state of the first.
    home = {rule.hf_names: rule.megatron_name for rule in rules if not rule.is_copy}
    for part in _parts(optimizer):
        is_distributed = hasattr(part, "gbuf_ranges")
        for parameter, main in _updated(part):
            rule, start = found[id(parameter)], 0
            if is_distributed:
                start = part._get_model_param_range_map(parameter)["param"].start
            state = part.optimizer.state[main]
            tensors = {name: state[name].detach().view(-1) for name in _MOMENTS}
            if main.dtype != parameter.dtype:
                tensors[_MAIN] = main.detach().view(-1)
            piece = Piece(
                home[rule.hf_names],
                tuple(parameter.shape),
                start,
                tensors,
                process.tensor_rank,
                process.layout.tensor,
            )
            yield _Held(rule, parameter, piece, is_shared=not is_distributed)


def _parts(optimizer: Any) -> list[Any]:
    """Megatron chains an optimizer for experts to that for everything else."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in parts if part.optimizer is not None]


def _updated(part: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Each parameter of the model and the tensor that is updated in its place, or a part of it."""
    pairs: tuple[tuple[Iterable[Any], Iterable[Any]], ...]
    if hasattr(part, "gbuf_ranges"):
        pairs = (
            (part.model_float16_groups, part.shard_fp32_from_float16_groups),
            (part.model_fp32_groups, part.shard_fp32_groups),
        )
    elif hasattr(part, "float16_groups"):
        pairs = (
            (part.float16_groups, part.fp32_from_float16_groups),
            (part.fp32_from_fp32_groups, part.fp32_from_fp32_groups),
        )
    else:
        groups = [group["params"] for group in part.optimizer.param_groups]
        pairs = ((groups, groups),)
    for parameters, mains in pairs:
        yield from zip(chain(*parameters), chain(*mains), strict=True)


def _own_part(held: _Held, process: Process) -> Piece:
    """What this rank writes: an equal share of what all replicas keep."""
    piece = held.piece
    if not held.is_shared:
        return piece
    rank, count = _replica(held.parameter, process)
    (length,) = {tensor.numel() for tensor in piece.tensors.values()}
    first, last = rank * length // count, (rank + 1) * length // count
    tensors = {field: tensor[first:last] for field, tensor in piece.tensors.items()}
    return replace(piece, start=piece.start + first, tensors=tensors)


def _replica(parameter: Tensor, process: Process) -> tuple[int, int]:
    """This rank among those that hold the same weight, and their number."""
    layout = process.layout
    if getattr(parameter, "allreduce", True):
        return process.replica_rank, layout.data * layout.context
    # An expert's, by Megatron's mark.
    from megatron.core import parallel_state

    group = parallel_state.get_expert_data_parallel_group()
    return torch.distributed.get_rank(group), torch.distributed.get_world_size(group)


def _fill_resharded(piece: Piece, files: PieceFiles, rule: WeightRule) -> None:
    """Join the shards that were saved, as their weight is joined, and cut them anew."""
    saved = range(files.num_shards(piece.name))
    for field, tensor in piece.tensors.items():
        whole = rule.split.join([files.shard(piece.name, field, shard) for shard in saved])
        shard = rule.split.shard(
            lambda index, slices, whole=whole: whole[index][slices], piece.shard, piece.num_shards
        )
        assert tuple(shard.shape) == piece.shape, f"{piece.name}: {shard.shape}, {piece.shape}"
        tensor.copy_(shard.reshape(-1)[piece.start : piece.start + tensor.numel()])


def _make_state(optimizer: Any) -> None:
    """Give an Adam that has not stepped yet the zero state that its first step would make."""
    for part in _parts(optimizer):
        part.init_state_fn(part.optimizer, part.config)
    if _step(optimizer) == 0:
        _set_step(optimizer, 0)


def _step(optimizer: Any) -> int:
    """Steps made: torch's Adam counts them for each parameter, fused ones for each group."""
    states = (state for part in _parts(optimizer) for state in part.optimizer.state.values())
    groups = (group for part in _parts(optimizer) for group in part.optimizer.param_groups)
    holders: Iterable[Mapping[str, Any]] = chain(states, groups)
    return max((int(holder[_STEP]) for holder in holders if _STEP in holder), default=0)


def _set_step(optimizer: Any, step: int) -> None:
    for part in _parts(optimizer):
        if isinstance(part.optimizer, torch.optim.Adam | torch.optim.AdamW):
            for state in part.optimizer.state.values():
                state[_STEP] = torch.tensor(float(step))
        else:
            for group in part.optimizer.param_groups:
                group[_STEP] = step
