"""Log-prob and entropy in plain torch, a bounded chunk of rows at a time.

With z = W h / temperature, m = max z, s = sum e^(z - m) and u = sum e^(z - m) (z - m):
log-prob of y is z_y - m - ln s, and the entropy is ln s - u / s. The four numbers (m, s, u, z_y) of
each vocabulary shard merge into those of the whole vocabulary, so tensor parallelism costs one
all-gather. The backward pass recomputes z, and p from the saved m and ln s:
dz = [g_logprob (1_y - p) - g_entropy p (ln p + H)] / temperature.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributed import ProcessGroup

_WORKSPACE_BYTES = 64 * 2**20


def linear_logprob(
    hidden: Float[Tensor, "T_local H"],
    weight: Float[Tensor, "V_local H"],
    targets: Int[Tensor, " T"],
    temperature: float,
    vocab_size: int,
    tensor_group: ProcessGroup | None = None,
    sequence_parallel: bool = False,
) -> tuple[Float[Tensor, " T"], Float[Tensor, " T"]]:
    """Log-prob of each target and entropy of the distribution it is drawn from, in nats.

    Args:
        hidden: Output of the last layer. With sequence parallelism this rank's part of the rows.
        weight: This rank's rows of the head; rank r of the tensor group holds the r-th shard.
        targets: Token that each row predicts; -1 skips a row (log-prob and entropy 0, no gradient).
        temperature: Logits are divided by it; > 0.
        vocab_size: Rows of the head that are real; those behind are padding and take no part.
        tensor_group: Ranks that share the vocabulary; None for one.
        sequence_parallel: Rows of `hidden` are split over the tensor group.

    Returns:
        Two [T], fp32 (fp64 for fp64 input), equal on all ranks of the group to the last bit.
    """
    result: tuple[Tensor, Tensor] = _LinearLogprob.apply(
        hidden, weight, targets, temperature, vocab_size, tensor_group, sequence_parallel
    )
    return result


def _group_size(group: ProcessGroup | None) -> int:
    return 1 if group is None else dist.get_world_size(group)


def _matmul(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b, accumulated and returned in `dtype` whatever the inputs are."""
    if a.dtype == dtype:
        return a @ b.to(dtype)
    if a.is_cuda and a.dtype == b.dtype:
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)


def _chunks(num_rows: int, row_bytes: int) -> list[slice]:
    size = max(16, _WORKSPACE_BYTES // max(row_bytes, 1))
    return [slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]


def _statistics(z: Tensor, column: Tensor) -> Tensor:
    """(m, s, u, z_y) [4, rows] of one shard's z [rows, V]; z_y = 0 where column is not here."""
    rows, width = z.shape
    if width == 0:
        empty = z.new_zeros(4, rows)
        empty[0] = -torch.inf
        return empty
    m = z.max(dim=1).values
    # A row that is -inf throughout has no maximum to subtract; its sums are 0.
    shifted = z - torch.where(m == -torch.inf, 0.0, m)[:, None]
    e = shifted.exp()
    u = torch.where(e > 0, e * shifted, 0.0).sum(dim=1)
    here = (column >= 0) & (column < width)
    z_y = z.gather(1, column.clamp(0, width - 1)[:, None])[:, 0]
    return torch.stack([m, e.sum(dim=1), u, torch.where(here, z_y, 0.0)])


def _merge(shards: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(m, ln s, entropy, z_y) [rows] of the whole vocabulary from shards [num_shards, 4, rows].

    m and ln s are kept apart: z - m is exact where z is close to m, however large both are. All in
    float64, which is nothing for a number per row: ln s is a few nats, where one float32 is 5e-7
    from the next, and that would be the better part of the difference between two layouts.
    """
    m, s, u, z_y = shards.double().unbind(dim=1)
    top = m.max(dim=0).values
    shift = torch.where(m == -torch.inf, 0.0, m - top)
    scale = torch.where(m == -torch.inf, 0.0, shift.exp())
    total = (s * scale).sum(dim=0)
    weighted = ((u + s * shift) * scale).sum(dim=0)
    return top, total.log(), total.log() - weighted / total, z_y.sum(dim=0)


def _gather_rows(hidden: Tensor, group: ProcessGroup | None) -> Tensor:
    size = _group_size(group)
    full = hidden.new_empty(hidden.shape[0] * size, hidden.shape[1])
    dist.all_gather_into_tensor(full, hidden.contiguous(), group=group)
    return full


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        vocab_size: int,
        group: ProcessGroup | None,
        sequence_parallel: bool,
    ) -> tuple[Tensor, Tensor]:
        assert bool((targets < vocab_size).all()), "a target is no token of the vocabulary"
        size = _group_size(group)
        split = sequence_parallel and size > 1
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        first = 0 if size == 1 else dist.get_rank(group) * weight.shape[0]
        valid = max(0, min(weight.shape[0], vocab_size - first))
        rows = torch.nonzero(targets >= 0)[:, 0]
        full = _gather_rows(hidden, group) if split else hidden
        used = full[rows]
        column = targets[rows] - first
        head = weight[:valid].t()
        stats = used.new_empty(4, len(rows), dtype=dtype)
        for chunk in _chunks(len(rows), valid * dtype.itemsize):
            z = _matmul(used[chunk], head, dtype) / temperature
            stats[:, chunk] = _statistics(z, column[chunk])
        shards = stats[None]
        if size > 1:
            shards = stats.new_empty(size, *stats.shape)
            dist.all_gather_into_tensor(shards.flatten(0, 1), stats, group=group)
        top, log_sum, row_entropy, z_y = _merge(shards)
        logprob = used.new_zeros(len(targets), dtype=dtype)
        entropy = torch.zeros_like(logprob)
        logprob[rows] = (z_y - top - log_sum).to(dtype)
        top, log_sum, row_entropy = (x.to(dtype) for x in (top, log_sum, row_entropy))
        entropy[rows] = row_entropy
        ctx.save_for_backward(hidden, weight, rows, column, top, log_sum, row_entropy)
        ctx.numbers = (temperature, valid, group, split, dtype)
        return logprob, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, rows, column, top, log_sum, row_entropy = ctx.saved_tensors
        temperature, valid, group, split, dtype = ctx.numbers
        g_logprob, g_entropy = grads[0][rows], grads[1][rows]
        # Rows without a gradient cost nothing, whatever they hold.
        live = torch.nonzero((g_logprob != 0) | (g_entropy != 0))[:, 0]
        g_logprob, g_entropy = g_logprob[live, None], g_entropy[live, None]
        top, log_sum, row_entropy = top[live, None], log_sum[live, None], row_entropy[live, None]
        column = column[live]
        full = _gather_rows(hidden, group) if split else hidden
        used = full[rows[live]]
        head = weight[:valid]
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        d_used = used.new_zeros(used.shape, dtype=dtype)
        d_head = torch.zeros_like(head, dtype=dtype) if need_weight else None
        here = (column >= 0) & (column < valid)
        for chunk in _chunks(len(live), valid * dtype.itemsize):
            z = _matmul(used[chunk], head.t(), dtype) / temperature
            log_p = z - top[chunk] - log_sum[chunk]
            p = log_p.exp()
            spread = torch.where(p > 0, p * (log_p + row_entropy[chunk]), 0.0)
            dz = -g_logprob[chunk] * p - g_entropy[chunk] * spread
            mine = torch.nonzero(here[chunk])[:, 0]
            dz[mine, column[chunk][mine]] += g_logprob[chunk][mine, 0]
            dz /= temperature
            if need_hidden:
                d_used[chunk] = dz @ head.to(dtype)
            if d_head is not None:
                d_head.addmm_(dz.t(), used[chunk].to(dtype))
        d_weight = None
        if d_head is not None:
            d_weight = torch.zeros_like(weight)
            d_weight[:valid] = d_head.to(weight.dtype)
        d_hidden = None
        if need_hidden:
            d_full = full.new_zeros(full.shape, dtype=dtype)
            d_full[rows[live]] = d_used
            d_hidden = _reduce_hidden(d_full, hidden, group, split)
        return d_hidden, d_weight, None, None, None, None, None


def _reduce_hidden(
    d_full: Tensor, hidden: Tensor, group: ProcessGroup | None, split: bool
) -> Tensor:
    """Sum the shards' parts of the gradient: to every rank, or to each rank's own rows."""
    if split:
        mine = d_full.new_empty(hidden.shape)
        dist.reduce_scatter_tensor(mine, d_full, group=group)
        return mine.to(hidden.dtype)
    if _group_size(group) > 1:
        dist.all_reduce(d_full, group=group)
    return d_full.to(hidden.dtype)
