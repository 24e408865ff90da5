"""The one-pass mode: gradients while the logits of a chunk of rows are at hand.

Computing the logits anew is one of the four matrix products of a forward and backward pass. A loss
that is a sum over tokens knows a token's gradient as soon as its log-prob and entropy are known, so
it can be asked in the forward pass. The gradients of hidden states and head are linear in those of
log-prob and entropy: whatever arrives in the backward pass, what is missing is an ordinary backward
pass with the difference, over the rows that have one. So no result depends on the prediction, only
the time does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_megatron.kernels.linear_logprob.merge import RowResult, finish, merge
from rl_megatron.kernels.linear_logprob.passes import (
    Head,
    Problem,
    Rows,
    Upstream,
    add_gradients,
    nothing,
    operand,
    tile_gradient,
    tile_statistics,
)
from rl_megatron.kernels.linear_logprob.sharing import Sharing
from rl_megatron.kernels.linear_logprob.weight_gradient import HeldWeight, delivered, held_gradient

# (rows: int64 [n], log-prob [n], entropy [n]) -> (gradient of log-prob [n], of entropy [n]).
TokenGradient = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass
class Held:
    """Gradients of the forward pass, waiting for the backward pass: of hidden states [n, H] and
    head, each None if nobody wants it, and the gradients [n] that they were computed from."""

    d_used: Tensor | None
    d_weight: HeldWeight | None
    predicted: Upstream

    def add_missing(self, problem: Problem, g: Upstream) -> bool:
        """Make these the gradients for `g`. False, and nothing done, if not one row was predicted
        as it came: then everything is computed anew, and nothing is rounded twice."""
        missing = Upstream(*(a - b for a, b in zip(g, self.predicted, strict=True)))
        rows = missing.nonzero()
        if len(rows) == 0:
            return True
        if len(rows) == len(torch.unique(torch.cat([rows, self.predicted.nonzero()]))):
            return False
        d_some = None
        if self.d_used is not None:
            d_some = self.d_used.new_zeros(len(rows), self.d_used.shape[1])
        add_gradients(problem.take(rows), missing.take(rows), d_some, self.d_weight)
        if self.d_used is not None and d_some is not None:
            self.d_used[rows] += d_some
        return True

    def results(self, weight: Tensor, live: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of hidden states of the rows `live`, and of the weight as autograd wants it."""
        d_used = self.d_used
        if d_used is not None and len(live) < len(d_used):
            d_used = d_used[live]
        return d_used, None if self.d_weight is None else delivered(weight, self.d_weight)


def gradients_while_hot(
    head: Head,
    weight: Tensor,
    hidden: Tensor,
    rows: Rows,
    index: Tensor,
    sharing: Sharing,
    token_gradient: TokenGradient,
    needs: tuple[bool, ...],
) -> tuple[RowResult, Held]:
    """Results of n rows in the dtype of logits, and the gradients that `token_gradient` predicts.

    Args:
        head: The real rows of the shard.
        weight: All rows of the shard, padding included.
        hidden: [n, H].
        rows: Their targets and temperatures.
        index: What number each has among all rows, for `token_gradient`.
        sharing: Statistics of each chunk are gathered over it.
        token_gradient: Asked once for each chunk of rows; the same on all ranks.
        needs: Whether hidden states and weight want a gradient.
    """
    num_rows = len(hidden)
    held = Held(
        hidden.new_zeros(hidden.shape, dtype=head.dtype) if needs[0] else None,
        held_gradient(weight, head.dtype, head.kernels, head.tiles.columns) if needs[1] else None,
        Upstream(*(hidden.new_zeros(num_rows, dtype=head.dtype) for _ in range(2))),
    )
    result = RowResult(*(hidden.new_zeros(num_rows, dtype=head.dtype) for _ in RowResult._fields))
    cuts = head.tiles.kept_whole(num_rows, len(head.weight), head.dtype.itemsize)
    for cut in cuts or [slice(0, 0)]:
        _one_chunk(Problem(head, hidden, rows, result), held, cut, index, sharing, token_gradient)
    return result, held


def _one_chunk(
    problem: Problem,
    held: Held,
    cut: slice,
    index: Tensor,
    sharing: Sharing,
    token_gradient: TokenGradient,
) -> None:
    """Fill in results and held gradients of the rows in `cut`."""
    head, rows = problem.head, problem.rows.take(cut)
    tile = operand(head, problem.hidden, cut)
    parts = nothing(max(len(head.stretches), 1), len(rows.column), head)
    kept: list[Tensor] = []
    for part, columns in zip(parts, head.stretches, strict=False):
        logits = head.kernels.logits(tile, head.stretch(columns))
        part[:] = tile_statistics(head, logits, rows, columns)
        kept.append(logits)
    result = finish(merge(sharing.gather_statistics(merge(parts), head.dtype))).to(head.dtype)
    for whole, some in zip(problem.result, result, strict=True):
        whole[cut] = some
    g = Upstream(*token_gradient(index[cut], result.logprob, result.entropy))
    for whole, some in zip(held.predicted, g, strict=True):
        whole[cut] = some
    _add_kept(problem, held, cut, tile, kept)


def _add_kept(problem: Problem, held: Held, cut: slice, tile: Tensor, kept: list[Tensor]) -> None:
    """Add the gradients of the rows in `cut` from their logits, which are used up."""
    head = problem.head
    live = held.predicted.take(cut).nonzero()
    if len(live) == 0:
        return
    every = len(live) == cut.stop - cut.start
    inside = live + cut.start
    rows, g = problem.rows.take(inside), held.predicted.take(inside)
    result = RowResult(*(x[inside] for x in problem.result))
    tile = tile[: len(live)] if every else tile[live]
    d_tile = None
    for number, columns in enumerate(head.stretches):
        logits = kept[number] if every else kept[number][live]
        dlogits = tile_gradient(head, logits, rows, result, g, columns)
        kept[number] = dlogits  # The logits can go.
        if held.d_used is not None:
            part = head.kernels.hidden_gradient(dlogits, head.stretch(columns))
            d_tile = part if d_tile is None else d_tile.add_(part)
        if held.d_weight is not None:
            into = held.d_weight.open(columns)
            head.kernels.add_weight_gradient(into, dlogits, tile)
            held.d_weight.close(columns, into)
    if held.d_used is not None and d_tile is not None:
        held.d_used[inside] = d_tile
