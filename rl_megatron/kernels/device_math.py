"""Functions of kernels that Triton does not have, or not to the last digits."""

# The checker of shapes wraps functions; Triton reads their source and needs them bare, so each is
# marked `no_type_check`.

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
@no_type_check
def tanh(x):
    """tanh in fp32, to a few units in the last place, also close to 0."""
    square = x * x
    # (tanh(x) / x - 1) / x^2 in powers of x^2, fitted on |x| < 0.625 to 4e-9.
    small = -5.7170750e-3
    small = tl.fma(small, square, 2.0650618e-2)
    small = tl.fma(small, square, -5.3743508e-2)
    small = tl.fma(small, square, 1.3331491e-1)
    small = tl.fma(small, square, -3.3333284e-1)
    small = tl.fma(small * square, x, x)
    large = 1.0 - 2.0 / (tl.exp2(tl.abs(x) * (2.0 * LOG2E)) + 1.0)
    large = tl.where(x < 0, -large, large)
    return tl.where(tl.abs(x) < 0.625, small, large)


@triton.jit
@no_type_check
def expm1_less_x(x):
    """exp(x) - 1 - x in fp64 without cancellation: a series where the terms would cancel."""
    series = 1.0 / 1307674368000.0
    series = series * x + 1.0 / 87178291200.0
    series = series * x + 1.0 / 6227020800.0
    series = series * x + 1.0 / 479001600.0
    series = series * x + 1.0 / 39916800.0
    series = series * x + 1.0 / 3628800.0
    series = series * x + 1.0 / 362880.0
    series = series * x + 1.0 / 40320.0
    series = series * x + 1.0 / 5040.0
    series = series * x + 1.0 / 720.0
    series = series * x + 1.0 / 120.0
    series = series * x + 1.0 / 24.0
    series = series * x + 1.0 / 6.0
    series = series * x + 0.5
    return tl.where(tl.abs(x) < 0.5, series * x * x, tl.exp(x) - 1.0 - x)


@triton.jit
@no_type_check
def log1p(x):
    """ln(1 + x) in fp64 for x >= 0, to full relative precision."""
    rounded = 1.0 + x
    # What rounding 1 + x did to x it also did, in proportion, to the logarithm.
    exact = rounded == 1.0
    return tl.where(exact, x, tl.log(rounded) * (x / tl.where(exact, 1.0, rounded - 1.0)))


@triton.jit
@no_type_check
def sigmoids(x):
    """ln sigmoid(x), ln sigmoid(-x), sigmoid(x) and sigmoid(-x) in fp64, from one exponential."""
    e = tl.exp(-tl.abs(x))
    tail = log1p(e)
    large, small = 1.0 / (1.0 + e), e / (1.0 + e)
    negative = x < 0
    return (
        tl.where(negative, x, 0.0) - tail,
        tl.where(negative, 0.0, -x) - tail,
        tl.where(negative, small, large),
        tl.where(negative, large, small),
    )


@triton.jit
@no_type_check
def load_counted(ptr, index, counted):
    """Values in fp64; one that does not count is not read and is 0."""
    return tl.load(ptr + index, mask=counted, other=0.0).to(tl.float64)
