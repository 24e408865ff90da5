"""The passes over tiles: statistics of rows, and gradients of rows whose statistics are known.

Both go over the vocabulary outside and over the rows inside. A stretch of a half-precision head is
then widened once where products need it (on a CPU, whose half-precision ones are slow or rounded),
and the gradient of the head is finished a stretch at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rl_megatron.kernels.linear_logprob.merge import RowResult, merge
from rl_megatron.kernels.linear_logprob.rows import RowKernels
from rl_megatron.kernels.linear_logprob.tiles import Tiles, filled_up
from rl_megatron.kernels.linear_logprob.weight_gradient import WeightGradient


@dataclass(frozen=True)
class Head:
    """The real rows of this rank's shard [V, H], and how logits are made of it.

    `dtype` is that of logits and sums, `operand` that of the factors of matrix products. `room`
    [>= stretch, H] of that dtype is where a stretch is widened: memory taken and given back for
    each would leave holes between the logits that are kept. None if the weight is of that dtype.
    """

    weight: Tensor
    softcap: float | None
    kernels: RowKernels
    tiles: Tiles
    dtype: torch.dtype
    operand: torch.dtype
    room: Tensor | None

    @property
    def stretches(self) -> list[slice]:
        """The vocabulary, cut."""
        return self.tiles.of_columns(len(self.weight))

    def stretch(self, columns: slice) -> Tensor:
        """A cut of the head, ready to be multiplied with, until the next one is asked for."""
        part = self.weight[columns]
        return part if self.room is None else self.room[: len(part)].copy_(part)


class Rows(NamedTuple):
    """What the kernels need to know of n rows beside hidden states; `column` [n] is the target
    counted from the first column of this shard, `inv_temperature` [n]."""

    column: Tensor
    inv_temperature: Tensor

    def take(self, index: Tensor | slice) -> Rows:
        """Some of the rows."""
        return Rows(*(x[index] for x in self))


class Upstream(NamedTuple):
    """Gradients that arrive at log-prob and entropy of n rows, [n] each."""

    logprob: Tensor
    entropy: Tensor

    def take(self, index: Tensor | slice) -> Upstream:
        """Some of the rows."""
        return Upstream(*(x[index] for x in self))

    def nonzero(self) -> Tensor:
        """The rows that have any."""
        return torch.nonzero((self.logprob != 0) | (self.entropy != 0))[:, 0]


class Problem(NamedTuple):
    """n rows with a target: head, hidden states [n, H], and what is known of the rows."""

    head: Head
    hidden: Tensor
    rows: Rows
    result: RowResult

    def take(self, index: Tensor) -> Problem:
        """Some of the rows, in their order."""
        if len(index) == len(self.hidden):
            return self
        some = RowResult(*(x[index] for x in self.result))
        return Problem(self.head, self.hidden[index], self.rows.take(index), some)


def operand(head: Head, hidden: Tensor, cut: slice) -> Tensor:
    """Hidden states of a tile of rows, ready to be multiplied, filled up if it is a short one."""
    return filled_up(hidden[cut].to(head.operand)).contiguous()


def statistics(head: Head, hidden: Tensor, rows: Rows) -> Tensor:
    """(m, s, u, z of the target) [4, n] float64 of this shard; see `merge`."""
    cuts = head.tiles.of_rows(len(hidden))
    parts = nothing(max(len(head.stretches), 1), len(hidden), head)
    for part, columns in zip(parts, head.stretches, strict=False):
        weight = head.stretch(columns)
        for cut in cuts:
            tile = operand(head, hidden, cut)
            logits = head.kernels.logits(tile, weight)
            part[:, cut] = tile_statistics(head, logits, rows.take(cut), columns)
    # A tile of rows at a time, as it is done in float64.
    return torch.cat([merge(parts[:, :, cut]) for cut in cuts or [slice(0, 0)]], dim=1)


def nothing(num_parts: int, num_rows: int, head: Head) -> Tensor:
    """Statistics [num_parts, 4, num_rows] of no columns at all."""
    parts = torch.zeros(num_parts, 4, num_rows, dtype=head.dtype, device=head.weight.device)
    parts[:, 0] = -torch.inf
    return parts


def tile_statistics(head: Head, logits: Tensor, rows: Rows, columns: slice) -> Tensor:
    """(m, s, u, z of the target) [4, n] of one tile, whose logits may have been filled up."""
    return head.kernels.statistics(
        logits[: len(rows.column)], rows.column - columns.start, rows.inv_temperature, head.softcap
    )


def tile_gradient(
    head: Head, logits: Tensor, rows: Rows, result: RowResult, g: Upstream, columns: slice
) -> Tensor:
    """Gradient to the logits of one tile, in the dtype of factors; may overwrite `logits`."""
    return head.kernels.gradient(
        logits[: len(rows.column)],
        rows.column - columns.start,
        rows.inv_temperature,
        head.softcap,
        result.top,
        result.log_sum,
        result.entropy,
        g.logprob,
        g.entropy,
        head.operand,
    )


def add_gradients(
    problem: Problem, g: Upstream, d_hidden: Tensor | None, d_weight: WeightGradient | None
) -> None:
    """Add this shard's gradients to d_hidden [n, H] and d_weight; None leaves one out."""
    head, hidden, rows, result = problem
    cuts = head.tiles.of_rows(len(hidden))
    for columns in head.stretches if cuts else []:
        weight = head.stretch(columns)
        into = None if d_weight is None else d_weight.open(columns)
        for cut in cuts:
            tile = operand(head, hidden, cut)
            logits = head.kernels.logits(tile, weight)
            some = RowResult(*(x[cut] for x in result))
            dlogits = tile_gradient(head, logits, rows.take(cut), some, g.take(cut), columns)
            if d_hidden is not None:
                d_hidden[cut] += head.kernels.hidden_gradient(dlogits, weight)
            if into is not None:
                head.kernels.add_weight_gradient(into, dlogits, tile[: len(dlogits)])
        if d_weight is not None and into is not None:
            d_weight.close(columns, into)


def zero_hidden_gradient(problem: Problem) -> Tensor:
    """[n, H] zeros to add to, in the dtype of sums."""
    hidden = problem.hidden
    return hidden.new_zeros(hidden.shape, dtype=problem.head.dtype)
