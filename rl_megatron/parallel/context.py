"""Context parallelism: the tokens of a forward pass shared by the ranks of a group.

The packed tokens, whatever sequences they belong to, are cut into 2 x size chunks, and rank r holds
chunks r and 2 x size - 1 - r. A causal query sees more keys the later it stands, so an early and a
late chunk together cost about the same on every rank (Liu et al. 2023, striped by halves).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class ContextSplit:
    """How T packed tokens lie on the ranks of a context-parallel group.

    Attributes:
        group: The ranks.
        local: Packed places of this rank's tokens, in its order.
        order: Where each packed token is once the tokens of all ranks are laid end to end.
    """

    group: ProcessGroup
    local: Int[Tensor, " T_local"]
    order: Int[Tensor, " T"]

    def to(self, device: torch.device) -> ContextSplit:
        """The same with its indices on `device`."""
        return ContextSplit(self.group, self.local.to(device), self.order.to(device))

    @property
    def pieces(self) -> list[tuple[int, int, int]]:
        """(local start, packed start, packed end) of this rank's two chunks."""
        half = self.local.shape[0] // 2
        firsts = (int(self.local[0]), int(self.local[half]))
        return [(i * half, first, first + half) for i, first in enumerate(firsts)]


def split_tokens(num_tokens: int, group: ProcessGroup) -> ContextSplit:
    """This rank's split of `num_tokens` packed tokens, a multiple of 2 x size; on the host."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    assert num_tokens % (2 * size) == 0, f"{num_tokens} tokens over {size} context ranks"
    chunks = torch.arange(num_tokens).view(2 * size, -1)
    by_rank = [torch.cat([chunks[r], chunks[2 * size - 1 - r]]) for r in range(size)]
    order = torch.argsort(torch.cat(by_rank))
    return ContextSplit(group, by_rank[rank], order)


def gather_keys(local: Float[Tensor, "T_local ..."], split: ContextSplit) -> Float[Tensor, "T ..."]:
    """All ranks' rows in packed order. Every rank uses all of them, so gradients are summed."""
    gathered: Tensor = _GatherKeys.apply(local, split)  # type: ignore[no-untyped-call]
    return gathered


def gather_rows(
    local: Float[Tensor, "outputs T_local"], split: ContextSplit
) -> Float[Tensor, "outputs T"]:
    """All ranks' columns in packed order, for a loss that every rank computes alike.

    Backward each rank keeps the gradient of its own columns: the sum over ranks, which follows for
    every parameter, then counts each of them once.
    """
    gathered: Tensor = _GatherRows.apply(local, split)  # type: ignore[no-untyped-call]
    return gathered


def _all_gather(local: Tensor, split: ContextSplit) -> Tensor:
    size = dist.get_world_size(split.group)
    gathered = local.new_empty(size * local.shape[0], *local.shape[1:])
    dist.all_gather_into_tensor(gathered, local.contiguous(), group=split.group)
    return gathered[split.order]


class _GatherKeys(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, split: ContextSplit) -> Tensor:
        ctx.split = split
        return _all_gather(local, split)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        split: ContextSplit = ctx.split
        by_rank = torch.empty_like(grads[0])
        by_rank[split.order] = grads[0]
        mine = by_rank.new_empty(split.local.shape[0], *by_rank.shape[1:])
        dist.reduce_scatter_tensor(mine, by_rank, group=split.group)
        return mine, None


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, split: ContextSplit) -> Tensor:
        ctx.split = split
        return _all_gather(local.t(), split).t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0][:, ctx.split.local], None
