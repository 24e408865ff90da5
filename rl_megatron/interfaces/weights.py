"""What one Megatron parameter is in Hugging Face names, and how it is cut over tensor ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

Read = Callable[[int, tuple[slice, ...]], Tensor]
"""`read(index, slices)`: that part of the index-th Hugging Face tensor of a rule, nothing more."""


@runtime_checkable
class Split(Protocol):
    """How the Hugging Face tensors of one rule become the shards of one Megatron parameter."""

    @property
    def hf_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shape of each Hugging Face tensor, in the order of the rule's names."""
        ...

    def shard(self, read: Read, tp_rank: int, tp_size: int) -> Tensor:
        """The shard of one tensor-parallel rank; reads only the slices that it needs."""
        ...

    def join(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The Hugging Face tensors, from the shards of all tensor-parallel ranks in rank order."""
        ...


@dataclass(frozen=True)
class WeightRule:
    """One Megatron parameter of the whole model (global layer numbers).

    Attributes:
        hf_names: The Hugging Face tensors it is made of.
        megatron_name: Its name, e.g. `decoder.layers.3.mlp.linear_fc1.weight`.
        split: How the two are turned into each other.
        is_copy: A second home of a weight that another rule exports (the tied head on the last
            pipeline stage): filled when loading, absent where the stage needs none.
    """

    hf_names: tuple[str, ...]
    megatron_name: str
    split: Split
    is_copy: bool = False
