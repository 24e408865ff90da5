"""The fused head as one autograd function: who computes which rows, and what travels when.

Forward: rows without a target are left out. Backward: so are rows whose gradients are both 0; the
logits of the others are computed anew, from statistics that need no second exchange. With x = W h,
z = cap(x) / temperature and ln p = z - top - log_sum:
dx = [g_logprob (1_target - p) - g_entropy p (ln p + H)] cap'(x) / temperature.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_megatron.errors import DataError
from rl_megatron.kernels.linear_logprob.merge import RowResult, finish, merge
from rl_megatron.kernels.linear_logprob.one_pass import TokenGradient, gradients_while_hot
from rl_megatron.kernels.linear_logprob.passes import (
    Head,
    Problem,
    Rows,
    Upstream,
    add_gradients,
    statistics,
    zero_hidden_gradient,
)
from rl_megatron.kernels.linear_logprob.rows import RowKernels
from rl_megatron.kernels.linear_logprob.sharing import Sharing
from rl_megatron.kernels.linear_logprob.tiles import tiles_for
from rl_megatron.kernels.linear_logprob.weight_gradient import weight_gradient


@dataclass(frozen=True)
class Call:
    """What is asked for, beside hidden states and head."""

    targets: Tensor
    temperature: float | Tensor
    vocab_size: int
    sharing: Sharing
    softcap: float | None
    kernels: RowKernels
    token_gradient: TokenGradient | None


def apply(hidden: Tensor, weight: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy [T] each."""
    result: tuple[Tensor, Tensor] = _FusedHead.apply(hidden, weight, call)
    return result


class _FusedHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        sharing = call.sharing
        _check_targets(call.targets, call.vocab_size)
        parts = sharing.size if sharing.split else 1
        assert len(call.targets) == parts * len(hidden), "targets and hidden states do not match"
        head = _head(hidden, weight, call)
        index = torch.nonzero(call.targets >= 0)[:, 0]
        used = sharing.rows_in_use(hidden, index)
        column = call.targets[index].long() - sharing.rank * len(weight)
        rows = Rows(column, _inv_temperature(call.temperature, index, head.dtype))
        held = None
        if call.token_gradient is None:
            found = statistics(head, used, rows)
            result = finish(merge(sharing.gather_statistics(found, head.dtype)))
            result = result.to(head.dtype)
        else:
            result, held = gradients_while_hot(
                head, weight, used, rows, index, sharing, call.token_gradient, ctx.needs_input_grad
            )
        # With sequence parallelism the gathered rows are kept, so that nothing is gathered twice.
        ctx.save_for_backward(used if sharing.split else hidden, weight, index, *rows, *result)
        ctx.call, ctx.num_local, ctx.held = call, len(hidden), held
        logprob = used.new_zeros(len(call.targets), dtype=head.dtype)
        entropy = torch.zeros_like(logprob)
        logprob[index], entropy[index] = result.logprob, result.entropy
        return logprob, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        kept, weight, index, column, inv_temperature, *result = ctx.saved_tensors
        call: Call = ctx.call
        used = kept if call.sharing.split else call.sharing.rows_in_use(kept, index)
        head = _head(kept, weight, call)
        problem = Problem(head, used, Rows(column, inv_temperature), RowResult(*result))
        g = Upstream(grads[0][index], grads[1][index])
        live = g.nonzero()
        # What was held may be given away here: a second backward pass computes everything anew.
        held, ctx.held = ctx.held, None
        if held is not None and held.add_missing(problem, g):
            d_used, d_weight = held.results(weight, live)
        else:
            d_used, d_weight = _gradients(
                problem.take(live), weight, g.take(live), ctx.needs_input_grad
            )
        d_hidden = None
        if d_used is not None:
            d_hidden = call.sharing.sum_hidden(d_used, index[live], ctx.num_local, kept.dtype)
        return d_hidden, d_weight, None


def _gradients(
    problem: Problem, weight: Tensor, g: Upstream, needs: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """This shard's gradients: of the rows' hidden states [n, H], and of the weight."""
    d_used = zero_hidden_gradient(problem) if needs[0] else None
    d_weight = weight_gradient(weight, problem.head.dtype) if needs[1] else None
    add_gradients(problem, g, d_used, d_weight)
    return d_used, None if d_weight is None else d_weight.result()


def _head(hidden: Tensor, weight: Tensor, call: Call) -> Head:
    """The real rows of this rank's shard, and the dtypes to compute in."""
    dtype = torch.promote_types(hidden.dtype, weight.dtype)
    dtype = torch.float64 if dtype == torch.float64 else torch.float32
    # A GPU adds up products of half precision in float32; a CPU is slower at them, or rounds.
    halves = hidden.is_cuda and hidden.dtype == weight.dtype
    operand = weight.dtype if halves else dtype
    tiles = tiles_for(hidden.device)
    room = None
    if weight.dtype != operand:
        room = weight.new_empty(min(tiles.columns, len(weight)), weight.shape[1], dtype=operand)
    return Head(
        weight=weight[: max(0, call.vocab_size - call.sharing.rank * len(weight))],
        softcap=call.softcap,
        kernels=call.kernels,
        tiles=tiles,
        dtype=dtype,
        operand=operand,
        room=room,
    )


def _inv_temperature(temperature: float | Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
    """1 / temperature of the rows in `index`, [n]."""
    if isinstance(temperature, Tensor):
        return temperature[index].to(dtype).reciprocal()
    return torch.full(index.shape, 1 / temperature, dtype=dtype, device=index.device)


def _check_targets(targets: Tensor, vocab_size: int) -> None:
    """Refuse targets that are no token; on a GPU without waiting for it to get there."""
    if targets.is_cuda:
        torch._assert_async((targets < vocab_size).all(), "a target is not below vocab_size")
    elif len(targets) and int(targets.max()) >= vocab_size:
        raise DataError(
            f"Target {int(targets.max())} is no token of a vocabulary of {vocab_size}. "
            "Tokenizer and model do not belong together, or a target is not a token id."
        )
