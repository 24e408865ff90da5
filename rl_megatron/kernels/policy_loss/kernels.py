"""The policy loss in Triton: one kernel over the tokens, one that sums what its blocks found.

What is worked out for a token, and why, stands with the definitions in `losses/policy.py` and
`losses/kl.py`; here are the same functions and their derivatives, in fp64.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from rl_megatron.kernels.device_math import expm1_less_x, load_counted

MAX_LOG_RATIO = tl.constexpr(20.0)
# Columns of the partial sums. All but the last are added up; the last is a maximum.
POLICY = tl.constexpr(0)
KL = tl.constexpr(1)
WEIGHED_ENTROPY = tl.constexpr(2)
CLIPPED_LOW = tl.constexpr(3)
CLIPPED_HIGH = tl.constexpr(4)
CLIPPED_DUAL = tl.constexpr(5)
RATIO = tl.constexpr(6)
APPROX_KL = tl.constexpr(7)
ENTROPY = tl.constexpr(8)
KL_TO_REFERENCE = tl.constexpr(9)
RATIO_MAX = tl.constexpr(10)
NUM_COLUMNS = tl.constexpr(16)  # The next power of two.

_PER_TOKEN = [
    "logprobs_ptr",
    "entropy_ptr",
    "old_logprobs_ptr",
    "advantages_ptr",
    "weights_ptr",
    "ref_logprobs_ptr",
    "cu_seqlens_ptr",
    "g_logprob_ptr",
    "g_entropy_ptr",
]


@triton.jit
@no_type_check
def clamp_log_ratio(x):
    """`x` within [-20, 20], NaN kept, and whether it was within: 1 or 0."""
    low = x < -MAX_LOG_RATIO
    high = x > MAX_LOG_RATIO
    bounded = tl.where(high, MAX_LOG_RATIO, tl.where(low, -MAX_LOG_RATIO, x))
    return bounded, tl.where(low, 0.0, tl.where(high, 0.0, 1.0))


@triton.jit
@no_type_check
def k3(r):
    """The estimator e^r - 1 - r and its slope in r, both of r <= 20."""
    high = r > MAX_LOG_RATIO
    bounded = tl.where(high, MAX_LOG_RATIO, r)
    value = expm1_less_x(bounded)
    return value, tl.where(high, 0.0, value + bounded)


@triton.jit
@no_type_check
def kl_estimate(r, KL_TYPE: tl.constexpr):  # noqa: N803
    """Value and slope in r = ref_logprobs - logprobs of the KL that is in the loss."""
    if KL_TYPE == "k1":
        value, slope = -r, tl.zeros_like(r) - 1.0
    elif KL_TYPE == "k2":
        value, slope = 0.5 * r * r, r
    else:
        value, slope = k3(r)
    return value, slope


@triton.jit
@no_type_check
def bound_ratio(ratio, advantages, low, high, dual, HAS_DUAL: tl.constexpr):  # noqa: N803
    """The ratio after every bound, its slope in the ratio, and which bound it met, as 1 or 0."""
    at_low = (advantages < 0) & (ratio < 1.0 - low)
    at_high = (advantages > 0) & (ratio > 1.0 + high)
    bounded = tl.where(at_low, 1.0 - low, tl.where(at_high, 1.0 + high, ratio))
    free = tl.where(at_low | at_high, 0.0, 1.0)
    at_dual = tl.zeros_like(free)
    if HAS_DUAL:
        beyond = (advantages < 0) & (ratio > dual)
        bounded = tl.where(beyond, dual, bounded)
        free = tl.where(beyond, 0.0, free)
        at_dual = tl.where(beyond, 1.0, 0.0)
    return bounded, free, tl.where(at_low, 1.0, 0.0), tl.where(at_high, 1.0, 0.0), at_dual


@triton.jit
@no_type_check
def sequence_slope(
    logprobs_ptr,
    old_logprobs_ptr,
    advantages_ptr,
    weights_ptr,
    first,
    last,
    low,
    high,
    dual,
    HAS_DUAL: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """A sequence's ratio, and the derivative of its policy loss by each of its log-probs."""
    log_ratio = tl.zeros([BLOCK], tl.float64)
    num_counted = tl.zeros([BLOCK], tl.float64)
    for start in range(first, last, BLOCK):
        index = start + tl.arange(0, BLOCK)
        counted = tl.load(weights_ptr + index, mask=index < last, other=0.0) != 0
        now = load_counted(logprobs_ptr, index, counted)
        log_ratio += now - load_counted(old_logprobs_ptr, index, counted)
        num_counted += tl.where(counted, 1.0, 0.0)
    length = tl.maximum(tl.sum(num_counted, 0), 1.0)
    mean, within = clamp_log_ratio(tl.sum(log_ratio, 0) / length)
    ratio = tl.exp(mean)
    slope = tl.zeros([BLOCK], tl.float64)
    for start in range(first, last, BLOCK):
        index = start + tl.arange(0, BLOCK)
        weights = tl.load(weights_ptr + index, mask=index < last, other=0.0).to(tl.float64)
        advantages = load_counted(advantages_ptr, index, weights != 0)
        spread = tl.zeros([BLOCK], tl.float64) + ratio
        _, free, _, _, _ = bound_ratio(spread, advantages, low, high, dual, HAS_DUAL)
        slope += tl.where(free != 0, -advantages * weights, 0.0)
    return ratio, tl.sum(slope, 0) * ratio * within / length


@triton.jit
@no_type_check
def policy_terms(
    now,
    log_ratio,
    advantages,
    sequence_ratio,
    low,
    high,
    dual,
    LOSS_MODE: tl.constexpr,  # noqa: N803
    HAS_DUAL: tl.constexpr,  # noqa: N803
):
    """Policy loss of each token, its slope in the token's log-prob, the ratio, and its bounds.

    The slope is that of modes vanilla and cispo; in mode gspo it belongs to the sequence.
    """
    bounded_log_ratio, within = clamp_log_ratio(log_ratio)
    if LOSS_MODE == "gspo":
        ratio = tl.zeros_like(now) + sequence_ratio
    else:
        ratio = tl.exp(bounded_log_ratio)
    if LOSS_MODE == "cispo":
        at_low = tl.where(ratio < 1.0 - low, 1.0, 0.0)
        at_high = tl.where(ratio > 1.0 + high, 1.0, 0.0)
        at_dual = tl.zeros_like(now)
        bounded = tl.where(at_high != 0, 1.0 + high, tl.where(at_low != 0, 1.0 - low, ratio))
        loss, slope = -advantages * bounded * now, -advantages * bounded
    else:
        bounded, free, at_low, at_high, at_dual = bound_ratio(
            ratio, advantages, low, high, dual, HAS_DUAL
        )
        loss = -advantages * bounded
        slope = tl.where(free * within != 0, -advantages * ratio, 0.0)
    return loss, slope, ratio, at_low, at_high, at_dual


@triton.jit(
    do_not_specialize=["num_tokens", "num_sequences"], do_not_specialize_on_alignment=_PER_TOKEN
)
@no_type_check
def tokens_kernel(
    logprobs_ptr,
    entropy_ptr,
    old_logprobs_ptr,
    advantages_ptr,
    weights_ptr,
    ref_logprobs_ptr,
    cu_seqlens_ptr,
    g_logprob_ptr,
    g_entropy_ptr,
    partial_ptr,
    num_tokens,
    num_sequences,
    low: tl.float64,
    high: tl.float64,
    dual: tl.float64,
    kl_coef: tl.float64,
    entropy_coef: tl.float64,
    LOSS_MODE: tl.constexpr,  # noqa: N803
    HAS_DUAL: tl.constexpr,  # noqa: N803
    KL_TYPE: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Gradients of a span of tokens, and one row of partial sums.

    A span is a block of tokens; in mode gspo it is a sequence, whose ratio all its tokens share.
    """
    program = tl.program_id(0)
    if LOSS_MODE == "gspo":
        here = program < num_sequences
        first = tl.load(cu_seqlens_ptr + program, mask=here, other=0).to(tl.int32)
        last = tl.load(cu_seqlens_ptr + program + 1, mask=here, other=0).to(tl.int32)
        sequence_ratio, slope_of_sequence = sequence_slope(
            logprobs_ptr, old_logprobs_ptr, advantages_ptr, weights_ptr,
            first, last, low, high, dual, HAS_DUAL, BLOCK,
        )  # fmt: skip
    else:
        first = program * BLOCK
        last = tl.minimum(first + BLOCK, num_tokens)
        sequence_ratio = 1.0
    columns = tl.arange(0, NUM_COLUMNS)
    totals = tl.zeros([NUM_COLUMNS], tl.float64)
    for start in range(first, last, BLOCK):
        index = start + tl.arange(0, BLOCK)
        inside = index < last
        weights = tl.load(weights_ptr + index, mask=inside, other=0.0).to(tl.float64)
        counted = weights != 0
        now = load_counted(logprobs_ptr, index, counted)
        log_ratio = now - load_counted(old_logprobs_ptr, index, counted)
        advantages = load_counted(advantages_ptr, index, counted)
        loss, slope, ratio, at_low, at_high, at_dual = policy_terms(
            now, log_ratio, advantages, sequence_ratio, low, high, dual, LOSS_MODE, HAS_DUAL
        )
        slope = slope * weights
        if LOSS_MODE == "gspo":
            slope = tl.zeros_like(now) + slope_of_sequence
        totals += tl.where(columns == POLICY, tl.sum(loss * weights, 0), 0.0)
        totals += tl.where(columns == CLIPPED_LOW, tl.sum(tl.where(counted, at_low, 0.0), 0), 0.0)
        totals += tl.where(columns == CLIPPED_HIGH, tl.sum(tl.where(counted, at_high, 0.0), 0), 0.0)
        totals += tl.where(columns == CLIPPED_DUAL, tl.sum(tl.where(counted, at_dual, 0.0), 0), 0.0)
        ratio = tl.where(counted, ratio, 0.0)
        totals += tl.where(columns == RATIO, tl.sum(ratio, 0), 0.0)
        largest = tl.maximum(totals, tl.max(ratio, 0))
        totals = tl.where(columns == RATIO_MAX, largest, totals)
        totals += tl.where(columns == APPROX_KL, tl.sum(k3(log_ratio)[0], 0), 0.0)
        entropy = load_counted(entropy_ptr, index, counted)
        totals += tl.where(columns == ENTROPY, tl.sum(entropy, 0), 0.0)
        if ref_logprobs_ptr is not None:
            r = load_counted(ref_logprobs_ptr, index, counted) - now
            totals += tl.where(columns == KL_TO_REFERENCE, tl.sum(k3(r)[0], 0), 0.0)
            if KL_TYPE is not None:
                kl, kl_slope = kl_estimate(r, KL_TYPE)
                totals += tl.where(columns == KL, tl.sum(kl * weights, 0), 0.0)
                slope -= kl_coef * kl_slope * weights
        tl.store(g_logprob_ptr + index, tl.where(counted, slope, 0.0), mask=inside)
        if g_entropy_ptr is not None:
            totals += tl.where(columns == WEIGHED_ENTROPY, tl.sum(entropy * weights, 0), 0.0)
            tl.store(g_entropy_ptr + index, -entropy_coef * weights, mask=inside)
    tl.store(partial_ptr + program * NUM_COLUMNS + columns, totals)


@triton.jit(do_not_specialize=["num_rows"])
@no_type_check
def sums_kernel(
    partial_ptr,
    values_ptr,
    loss_ptr,
    num_rows,
    kl_coef: tl.float64,
    entropy_coef: tl.float64,
    metric_scale: tl.float64,
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Rows of partial sums to metrics and loss, always in the same order."""
    columns = tl.arange(0, NUM_COLUMNS)
    totals = tl.zeros([NUM_COLUMNS], tl.float64)
    for start in range(0, num_rows, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        place = rows[:, None] * NUM_COLUMNS + columns[None, :]
        values = tl.load(partial_ptr + place, mask=(rows < num_rows)[:, None], other=0.0)
        largest = tl.maximum(totals, tl.max(values, 0))
        totals = tl.where(columns == RATIO_MAX, largest, totals + tl.sum(values, 0))
    # A maximum looks past NaN, a sum does not.
    ratios = tl.sum(tl.where(columns == RATIO, totals, 0.0), 0)
    totals = tl.where(
        (columns == RATIO_MAX) & (tl.zeros_like(totals) + ratios != ratios), ratios, totals
    )
    share = (columns >= CLIPPED_LOW) & (columns < RATIO_MAX)
    tl.store(values_ptr + columns, tl.where(share, totals * metric_scale, totals))
    coefficients = tl.where(columns == POLICY, 1.0, 0.0).to(tl.float64)
    coefficients = tl.where(columns == KL, kl_coef, coefficients)
    coefficients = tl.where(columns == WEIGHED_ENTROPY, -entropy_coef, coefficients)
    terms = tl.where(coefficients == 0, 0.0, coefficients * totals)
    tl.store(loss_ptr, tl.sum(terms, 0))
