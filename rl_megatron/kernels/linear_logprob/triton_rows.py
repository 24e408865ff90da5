"""Rows of logits on a GPU: matrix products by cuBLAS, everything between them by two kernels.

Both read each logit once. Block sizes are fixed: the numbers of a row depend on nothing else than
the row, and nothing is tuned while a run trains.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from rl_megatron.kernels.device_math import LN2, LOG2E, tanh
from rl_megatron.kernels.launch import launch
from rl_megatron.kernels.linear_logprob import sums

STATISTICS_BLOCK, STATISTICS_WARPS = 4096, 4
GRADIENT_BLOCK, GRADIENT_WARPS = 4096, 8
# From 2.10 on torch adds a product of half-precision matrices to a float32 one without a copy.
_ADDS_IN_PLACE = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 10)


class TritonRows:
    """The four numbers of a row of logits, and the way back, in Triton."""

    name = "triton"

    def logits(self, hidden: Float[Tensor, "n H"], weight: Float[Tensor, "V H"]) -> Tensor:
        """hidden @ weight^T [n, V] in fp32, accumulated in fp32, whatever the inputs are."""
        return _product(hidden, weight.t())

    def statistics(
        self,
        logits: Float[Tensor, "n V"],
        column: Int[Tensor, " n"],
        inv_temperature: Float[Tensor, " n"],
        softcap: float | None,
    ) -> Float[Tensor, "4 n"]:
        """(m, s, u, z_y) of z = inv_temperature * cap(logits).

        cap(x) = softcap * tanh(x / softcap); m = max z, s = sum e^(z - m) and
        u = sum e^(z - m) (z - m); z_y is 0 where the column is not one of these.
        """
        num_rows, width = logits.shape
        out = logits.new_empty(4, num_rows)
        if num_rows:
            launch(
                statistics_kernel,
                (num_rows,),
                _rows(logits),
                column.contiguous(),
                inv_temperature.contiguous(),
                out,
                softcap or 1.0,
                num_rows,
                width,
                HAS_CAP=softcap is not None,
                BLOCK=STATISTICS_BLOCK,
                num_warps=STATISTICS_WARPS,
                enable_fp_fusion=True,
            )
        return out

    def gradient(
        self,
        logits: Float[Tensor, "n V"],
        column: Int[Tensor, " n"],
        inv_temperature: Float[Tensor, " n"],
        softcap: float | None,
        top: Float[Tensor, " n"],
        log_sum: Float[Tensor, " n"],
        entropy: Float[Tensor, " n"],
        g_logprob: Float[Tensor, " n"],
        g_entropy: Float[Tensor, " n"],
        dtype: torch.dtype,
    ) -> Float[Tensor, "n V"]:
        """Gradient of the raw logits in `dtype`; overwrites `logits` where that is its dtype too.

        dz = g_logprob (1_y - p) - g_entropy p (ln p + H), exactly 0 where p is 0 or both
        gradients of the row are; times inv_temperature and 1 - tanh^2 of the cap.
        """
        num_rows, width = logits.shape
        out = logits if dtype == logits.dtype else torch.empty_like(logits, dtype=dtype)
        if num_rows and width:
            per_row = (column, inv_temperature, top, log_sum, entropy, g_logprob, g_entropy)
            launch(
                gradient_kernel,
                (num_rows, triton.cdiv(width, GRADIENT_BLOCK)),
                _rows(logits),
                out,
                *(values.contiguous() for values in per_row),
                softcap or 1.0,
                width,
                HAS_CAP=softcap is not None,
                BLOCK=GRADIENT_BLOCK,
                num_warps=GRADIENT_WARPS,
                # x * inv_temperature is rounded as in the top that is subtracted from it, so that
                # the largest logit is exactly 0 from it.
                enable_fp_fusion=False,
            )
        return out

    def hidden_gradient(
        self, dlogits: Float[Tensor, "n V"], weight: Float[Tensor, "V H"]
    ) -> Float[Tensor, "n H"]:
        """dlogits @ weight in fp32."""
        return _product(dlogits, weight)

    def add_weight_gradient(
        self, into: Float[Tensor, "V H"], dlogits: Float[Tensor, "n V"], hidden: Tensor
    ) -> None:
        """into += dlogits^T @ hidden, accumulated in the fp32 of `into`."""
        a, b = dlogits.t(), hidden.to(dlogits.dtype)
        if a.dtype == into.dtype:
            into.addmm_(a, b)
        elif a.is_cuda and _ADDS_IN_PLACE:
            torch.addmm(into, a, b, out_dtype=into.dtype, out=into)
        else:
            into += _product(a, b)

    def join(self, high: Tensor, tail: Tensor, total: Tensor) -> None:
        """See `RowKernels`."""
        sums.join(high, tail, total)

    def split(self, total: Tensor, high: Tensor, tail: Tensor) -> None:
        """See `RowKernels`."""
        sums.split(total, high, tail)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in fp32. cuBLAS multiplies what is 16 bits wide as it is; the CPU has to widen it."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b.to(a.dtype), out_dtype=torch.float32)
    return a.float() @ b.float()


def _rows(logits: Tensor) -> Tensor:
    assert logits.dtype == torch.float32, "the kernels are of float32; float64 takes torch"
    assert logits.is_contiguous(), "rows of logits lie end to end"
    return logits


@triton.jit(
    do_not_specialize=["num_rows"],
    do_not_specialize_on_alignment=["column_ptr", "inv_temperature_ptr", "out_ptr"],
)
@no_type_check
def statistics_kernel(
    logits_ptr,
    column_ptr,
    inv_temperature_ptr,
    out_ptr,
    softcap,
    num_rows,
    width,
    HAS_CAP: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """One row per program: a maximum per block, then one exp2 and one product per logit."""
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * width
    inv_temperature = tl.load(inv_temperature_ptr + row)
    scale = inv_temperature * LOG2E
    top = -float("inf")
    total = 0.0
    weighted = 0.0
    for first in range(0, width, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = columns < width
        x = tl.load(row_ptr + columns, mask=inside, other=-float("inf"))
        if HAS_CAP:
            x = tl.where(inside, softcap * tanh(x / softcap), -float("inf"))
        new_top = tl.maximum(top, tl.max(x, 0))
        nothing = new_top == -float("inf")
        base = tl.where(nothing, 0.0, new_top * scale)
        distance = tl.fma(x, scale, -base)
        e = tl.exp2(distance)
        block_total = tl.sum(e, 0)
        block_weighted = tl.sum(e * distance, 0)
        # 0 * -inf of a logit that is -inf, or lies behind the row: only then look at each product.
        if block_weighted != block_weighted:
            block_weighted = tl.sum(tl.where(e > 0, e * distance, 0.0), 0)
        # `base` is rounded. The sums are to be from the maximum itself, not from a neighbour.
        residue = tl.where(nothing, 0.0, tl.fma(new_top, scale, -base))
        correction = tl.exp2(-residue)
        block_weighted = (block_weighted - residue * block_total) * correction
        lag = tl.where(top == -float("inf"), 0.0, (top - new_top) * scale)
        keep = tl.exp2(lag)
        weighted = (weighted + total * lag) * keep + block_weighted
        total = total * keep + block_total * correction
        top = new_top
    column = tl.load(column_ptr + row)
    here = (column >= 0) & (column < width)
    target = tl.load(row_ptr + column, mask=here, other=0.0)
    if HAS_CAP:
        target = softcap * tanh(target / softcap)
    tl.store(out_ptr + row, top * inv_temperature)
    tl.store(out_ptr + num_rows + row, total)
    tl.store(out_ptr + 2 * num_rows + row, weighted * LN2)
    tl.store(out_ptr + 3 * num_rows + row, target * inv_temperature)


@triton.jit(
    do_not_specialize_on_alignment=[
        "column_ptr",
        "inv_temperature_ptr",
        "top_ptr",
        "log_sum_ptr",
        "entropy_ptr",
        "g_logprob_ptr",
        "g_entropy_ptr",
    ]
)
@no_type_check
def gradient_kernel(
    logits_ptr,
    out_ptr,
    column_ptr,
    inv_temperature_ptr,
    top_ptr,
    log_sum_ptr,
    entropy_ptr,
    g_logprob_ptr,
    g_entropy_ptr,
    softcap,
    width,
    HAS_CAP: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """A block of a row per program; `out_ptr` may be `logits_ptr`."""
    row = tl.program_id(0)
    start = row.to(tl.int64) * width
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    out_ptr += start + columns
    g_logprob = tl.load(g_logprob_ptr + row)
    g_entropy = tl.load(g_entropy_ptr + row)
    if tl.abs(g_logprob) + tl.abs(g_entropy) == 0:
        tl.store(out_ptr, tl.zeros([BLOCK], out_ptr.dtype.element_ty), mask=inside)
        return
    inv_temperature = tl.load(inv_temperature_ptr + row)
    x = tl.load(logits_ptr + start + columns, mask=inside, other=-float("inf"))
    slope = inv_temperature
    if HAS_CAP:
        bounded = tanh(x / softcap)
        x = softcap * bounded
        slope = inv_temperature * (1.0 - bounded * bounded)
    log_p = (x * inv_temperature - tl.load(top_ptr + row)) - tl.load(log_sum_ptr + row)
    p = tl.exp2(log_p * LOG2E)
    # g_logprob + g_entropy * (log_p + entropy)
    pull = tl.fma(log_p, g_entropy, g_logprob + g_entropy * tl.load(entropy_ptr + row))
    dz = tl.where(p == 0, 0.0, -p * pull)
    # Added here, in fp32: a p close to 1 that was rounded first would leave nothing of 1 - p.
    column = tl.load(column_ptr + row).to(tl.int32)
    dz = tl.where(columns == column, dz + g_logprob, dz)
    tl.store(out_ptr, (dz * slope).to(out_ptr.dtype.element_ty), mask=inside)
