"""Ranks that share the vocabulary: which shard is whose, and what travels between them.

Forward: one all-gather of statistics, and with sequence parallelism one of the hidden states that
have a target. Backward: one reduce-scatter with sequence parallelism, else one all-reduce. All
ranks know all targets and get equal gradients, so all know which rows travel, and from where.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Sharing:
    """This rank's place among those of `group`; `split` says that rows are split over it, too."""

    group: ProcessGroup | None
    size: int
    rank: int
    split: bool

    @classmethod
    def of(cls, group: ProcessGroup | None, sequence_parallel: bool) -> Sharing:
        """The place in `group`; None is a group of one."""
        if group is None:
            return cls(None, 1, 0, split=False)
        size = dist.get_world_size(group)
        return cls(group, size, dist.get_rank(group), sequence_parallel and size > 1)

    def gather_statistics(self, statistics: Tensor, dtype: torch.dtype) -> Tensor:
        """[size, 4, n] in rank order from each rank's [4, n], which travel in `dtype`.

        In float32 a maximum and a target's logit are what they are; the sums lose 6e-8 of
        themselves, which is as much of a nat, and are merged in float64 again.
        """
        if self.size == 1:
            return statistics[None]
        statistics = statistics.to(dtype)
        shards = statistics.new_empty(self.size, *statistics.shape)
        dist.all_gather_into_tensor(shards.flatten(0, 1), statistics, group=self.group)
        return shards

    def rows_in_use(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Hidden states of `rows` [n] (increasing), [n, H], from every rank that has some."""
        if not self.split:
            return hidden if len(rows) == len(hidden) else hidden[rows]
        return _Slots(self, rows, len(hidden)).gather(hidden)

    def sum_hidden(
        self, d_used: Tensor, rows: Tensor, num_local: int, dtype: torch.dtype
    ) -> Tensor:
        """Gradient of this rank's hidden states [num_local, H], 0 outside `rows` [n], from each
        shard's part of the gradient of these rows [n, H]."""
        if self.split:
            slots = _Slots(self, rows, num_local)
            rows, d_used = slots.mine, slots.scatter(d_used)
        elif self.size > 1:
            dist.all_reduce(d_used, group=self.group)
        if len(rows) == num_local:
            return d_used.to(dtype)
        d_hidden = d_used.new_zeros(num_local, d_used.shape[1], dtype=dtype)
        d_hidden[rows] = d_used.to(dtype)
        return d_hidden


class _Slots:
    """Rows in buffers with equal room for each rank, as collectives want it.

    Rank r owns rows [r * num_local, (r + 1) * num_local). The room is what the rank with the most
    of `rows` needs, and never none, which not every collective would take.
    """

    def __init__(self, sharing: Sharing, rows: Tensor, num_local: int):
        owner = rows // max(num_local, 1)
        counts = torch.bincount(owner, minlength=sharing.size)
        starts = counts.cumsum(0) - counts
        per_rank = counts.tolist()
        self.sharing = sharing
        self.room = max(1, *per_rank)
        place = torch.arange(len(rows), device=rows.device) - starts[owner]
        self.slot = owner * self.room + place
        self.num_mine = per_rank[sharing.rank]
        first = sum(per_rank[: sharing.rank])
        self.mine = rows[first : first + self.num_mine] - sharing.rank * num_local

    def gather(self, hidden: Tensor) -> Tensor:
        part = hidden.new_zeros(self.room, hidden.shape[1])
        part[: self.num_mine] = hidden[self.mine]
        full = hidden.new_empty(self.room * self.sharing.size, hidden.shape[1])
        dist.all_gather_into_tensor(full, part, group=self.sharing.group)
        return full if len(self.slot) == len(full) else full[self.slot]

    def scatter(self, d_used: Tensor) -> Tensor:
        full = d_used
        if len(self.slot) < self.room * self.sharing.size:
            full = d_used.new_zeros(self.room * self.sharing.size, d_used.shape[1])
            full[self.slot] = d_used
        part = full.new_empty(self.room, full.shape[1])
        dist.reduce_scatter_tensor(part, full, group=self.sharing.group)
        return part[: self.num_mine]
