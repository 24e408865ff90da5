"""Split rules: how Hugging Face tensors become the shards of a Megatron parameter, and back.

Each rule is an inverse pair: `join` of the shards that `shard` cut is bit-equal to what was read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_megatron.interfaces.weights import Read


def padded_vocab_size(vocab_size: int, make_vocab_size_divisible_by: int, tp_size: int) -> int:
    """The smallest multiple of `make_vocab_size_divisible_by * tp_size` that holds the vocabulary.

    `vocab_size` is the true size; never feed the result back in.
    """
    multiple = make_vocab_size_divisible_by * tp_size
    return -(-vocab_size // multiple) * multiple


def _part(size: int, tp_rank: int, tp_size: int) -> slice:
    """The rank's equal part of `size` rows."""
    assert size % tp_size == 0, f"{size} rows over {tp_size} tensor ranks"
    rows = size // tp_size
    return slice(tp_rank * rows, (tp_rank + 1) * rows)


@dataclass(frozen=True)
class Replicated:
    """The whole tensor on every rank."""

    shape: tuple[int, ...]

    @property
    def hf_shapes(self) -> tuple[tuple[int, ...], ...]:
        """One tensor."""
        return (self.shape,)

    def shard(self, read: Read, tp_rank: int, tp_size: int) -> Tensor:
        """All of it."""
        return read(0, (slice(None),))

    def join(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The first rank's."""
        return (shards[0],)


@dataclass(frozen=True)
class Sliced:
    """Equal parts along one dimension: 0 for column-parallel weights, 1 for row-parallel ones."""

    shape: tuple[int, ...]
    dim: int

    @property
    def hf_shapes(self) -> tuple[tuple[int, ...], ...]:
        """One tensor."""
        return (self.shape,)

    def shard(self, read: Read, tp_rank: int, tp_size: int) -> Tensor:
        """The rank's part."""
        part = _part(self.shape[self.dim], tp_rank, tp_size)
        return read(0, (*(slice(None),) * self.dim, part))

    def join(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The parts, end to end."""
        return (torch.cat(list(shards), dim=self.dim),)


@dataclass(frozen=True)
class Qkv:
    """Query, key and value fused as Megatron wants them: group by group [q .. q, k, v].

    A group is one key-value head with the query heads that attend to it; ranks hold whole groups.

    Attributes:
        num_heads: Query heads.
        num_groups: Key and value heads.
        head_dim: Rows of one head.
        trailing: Dimensions after the rows: (hidden_size,) for a weight, () for a bias.
    """

    num_heads: int
    num_groups: int
    head_dim: int
    trailing: tuple[int, ...]

    @property
    def hf_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Query, key, value."""
        query, key = self.num_heads * self.head_dim, self.num_groups * self.head_dim
        return ((query, *self.trailing), (key, *self.trailing), (key, *self.trailing))

    def shard(self, read: Read, tp_rank: int, tp_size: int) -> Tensor:
        """The rank's groups."""
        parts = [
            read(index, (_part(shape[0], tp_rank, tp_size),)).unflatten(
                0, (self.num_groups // tp_size, -1)
            )
            for index, shape in enumerate(self.hf_shapes)
        ]
        return torch.cat(parts, dim=1).flatten(0, 1)

    def join(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Query, key, value."""
        groups = torch.cat(list(shards)).unflatten(0, (self.num_groups, -1))
        query_rows = self.num_heads // self.num_groups * self.head_dim
        parts = groups.split([query_rows, self.head_dim, self.head_dim], dim=1)
        return tuple(part.flatten(0, 1).contiguous() for part in parts)


@dataclass(frozen=True)
class GateUp:
    """Gate and up projections fused: each rank holds its gate rows, then its up rows."""

    intermediate_size: int
    hidden_size: int

    @property
    def hf_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Gate, up."""
        return ((self.intermediate_size, self.hidden_size),) * 2

    def shard(self, read: Read, tp_rank: int, tp_size: int) -> Tensor:
        """The rank's gate rows, then its up rows."""
        part = _part(self.intermediate_size, tp_rank, tp_size)
        return torch.cat([read(0, (part,)), read(1, (part,))])

    def join(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Gate, up."""
        halves = [shard.chunk(2) for shard in shards]
        return tuple(torch.cat(half) for half in zip(*halves, strict=True))


@dataclass(frozen=True)
class Vocab:
    """Rows of the vocabulary in equal parts, filled up with zero rows to the padded size."""

    vocab_size: int
    hidden_size: int
    make_vocab_size_divisible_by: int

    @property
    def hf_shapes(self) -> tuple[tuple[int, ...], ...]:
        """One table, without padding."""
        return ((self.vocab_size, self.hidden_size),)

    def shard(self, read: Read, tp_rank: int, tp_size: int) -> Tensor:
        """The rank's rows; those past the vocabulary are zero."""
        padded = padded_vocab_size(self.vocab_size, self.make_vocab_size_divisible_by, tp_size)
        part = _part(padded, tp_rank, tp_size)
        stop = min(part.stop, self.vocab_size)
        rows = read(0, (slice(min(part.start, stop), stop),))
        missing = part.stop - part.start - rows.shape[0]
        return torch.cat([rows, rows.new_zeros((missing, *rows.shape[1:]))])

    def join(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The table without padding."""
        return (torch.cat(list(shards))[: self.vocab_size].contiguous(),)
