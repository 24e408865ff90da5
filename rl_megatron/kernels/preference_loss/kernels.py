"""Preference losses in Triton: sums per sequence, a formula per pair, and the way back to tokens.

What is worked out for a pair, and why, stands with the definitions in `losses/preference.py` and
`losses/dpo.py`; here are the same functions and their derivatives, in fp64.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from rl_megatron.kernels.device_math import expm1_less_x, load_counted, sigmoids

# Columns of the sums of a sequence.
LOGP = tl.constexpr(0)
REF_LOGP = tl.constexpr(1)
NUM_COUNTED = tl.constexpr(2)
NUM_SUMS = tl.constexpr(3)
# Columns of the metrics.
LOSS = tl.constexpr(0)
CHOSEN = tl.constexpr(1)
REJECTED = tl.constexpr(2)
MARGIN = tl.constexpr(3)
ACCURACY = tl.constexpr(4)
LOGP_CHOSEN = tl.constexpr(5)
LOGP_REJECTED = tl.constexpr(6)
NLL = tl.constexpr(7)
NUM_COLUMNS = tl.constexpr(8)


@triton.jit(
    do_not_specialize=["num_sequences"],
    do_not_specialize_on_alignment=["logprobs_ptr", "ref_logprobs_ptr", "weights_ptr"],
)
@no_type_check
def sequence_sums_kernel(
    logprobs_ptr,
    ref_logprobs_ptr,
    weights_ptr,
    cu_seqlens_ptr,
    sums_ptr,
    num_sequences,
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Sums over the counted tokens of one sequence per program: log-probs, reference, a count."""
    sequence = tl.program_id(0)
    here = sequence < num_sequences
    first = tl.load(cu_seqlens_ptr + sequence, mask=here, other=0).to(tl.int32)
    last = tl.load(cu_seqlens_ptr + sequence + 1, mask=here, other=0).to(tl.int32)
    logp = tl.zeros([BLOCK], tl.float64)
    ref_logp = tl.zeros([BLOCK], tl.float64)
    num_counted = tl.zeros([BLOCK], tl.float64)
    for start in range(first, last, BLOCK):
        index = start + tl.arange(0, BLOCK)
        counted = tl.load(weights_ptr + index, mask=index < last, other=0.0) != 0
        logp += load_counted(logprobs_ptr, index, counted)
        if ref_logprobs_ptr is not None:
            ref_logp += load_counted(ref_logprobs_ptr, index, counted)
        num_counted += tl.where(counted, 1.0, 0.0)
    out_ptr = sums_ptr + sequence * NUM_SUMS
    tl.store(out_ptr + LOGP, tl.sum(logp, 0), mask=here)
    tl.store(out_ptr + REF_LOGP, tl.sum(ref_logp, 0), mask=here)
    tl.store(out_ptr + NUM_COUNTED, tl.sum(num_counted, 0), mask=here)


@triton.jit
@no_type_check
def log_odds(log_p):
    """ln(p / (1 - p)) and its slope in ln p."""
    complement = -(expm1_less_x(log_p) + log_p)
    return log_p - tl.log(complement), 1.0 / complement


@triton.jit
@no_type_check
def margin_loss(
    margin,
    beta,
    label_smoothing,
    simpo_gamma,
    LOSS_TYPE: tl.constexpr,  # noqa: N803
):
    """Loss of each pair as a function of its margin, and the slope in it."""
    if LOSS_TYPE == "hinge":
        loss = tl.where(margin > 1, 0.0, 1.0 - margin)
        slope = tl.where(margin < 1, -1.0, 0.0)
    elif LOSS_TYPE == "ipo":
        distance = (margin - 0.5) / beta
        loss, slope = distance * distance, 2.0 * distance / beta
    else:
        right, flipped, scale = 1.0 - label_smoothing, label_smoothing, 1.0
        if LOSS_TYPE == "simpo":
            margin, right, flipped = margin - simpo_gamma, 1.0, 0.0
        elif LOSS_TYPE == "robust":
            flipped, scale = -label_smoothing, 1.0 / (1.0 - 2.0 * label_smoothing)
        else:
            tl.static_assert(LOSS_TYPE == "sigmoid" or LOSS_TYPE == "sigmoid_norm")
        of_right, of_flipped, p, q = sigmoids(margin)
        loss = -scale * (right * of_right + flipped * of_flipped)
        slope = scale * (flipped * p - right * q)
    return loss, slope


@triton.jit
@no_type_check
def pair_loss(
    chosen,
    rejected,
    beta,
    label_smoothing,
    simpo_gamma,
    LOSS_TYPE: tl.constexpr,  # noqa: N803
):
    """Loss of each pair, and its slopes in the two implicit rewards."""
    if LOSS_TYPE == "orpo":
        of_chosen, slope_chosen = log_odds(chosen / beta)
        of_rejected, slope_rejected = log_odds(rejected / beta)
        log_p, _, _, q = sigmoids(of_chosen - of_rejected)
        loss, slope = -log_p, -q / beta
        slope_chosen, slope_rejected = slope * slope_chosen, -slope * slope_rejected
    else:
        loss, slope_chosen = margin_loss(
            chosen - rejected, beta, label_smoothing, simpo_gamma, LOSS_TYPE
        )
        slope_rejected = -slope_chosen
    return loss, slope_chosen, slope_rejected


@triton.jit
@no_type_check
def scores(sums_ptr, valid, AVERAGED: tl.constexpr):  # noqa: N803
    """Log-prob of a response, the same less the reference's, its sum, its length, their slope."""
    length = tl.maximum(tl.load(sums_ptr + NUM_COUNTED, mask=valid, other=0.0), 1.0)
    total = tl.load(sums_ptr + LOGP, mask=valid, other=0.0)
    reference = tl.load(sums_ptr + REF_LOGP, mask=valid, other=0.0)
    share = tl.zeros_like(length) + 1.0
    if AVERAGED:
        share = 1.0 / length
    return total * share, (total - reference) * share, total, length, share


@triton.jit(do_not_specialize=["num_pairs"])
@no_type_check
def pairs_kernel(
    sums_ptr,
    slopes_ptr,
    values_ptr,
    loss_ptr,
    num_pairs,
    beta: tl.float64,
    label_smoothing: tl.float64,
    simpo_gamma: tl.float64,
    pair_weight: tl.float64,
    nll_weight: tl.float64,
    pair_scale: tl.float64,
    LOSS_TYPE: tl.constexpr,  # noqa: N803
    AVERAGED: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """All pairs, in order: loss, metrics, and the slope of the loss in each sequence's log-prob."""
    columns = tl.arange(0, NUM_COLUMNS)
    totals = tl.zeros([NUM_COLUMNS], tl.float64)
    for start in range(0, num_pairs, BLOCK):
        pairs = start + tl.arange(0, BLOCK)
        inside = pairs < num_pairs
        chosen_ptr = sums_ptr + pairs * (2 * NUM_SUMS)
        rejected_ptr = chosen_ptr + NUM_SUMS
        valid = tl.load(chosen_ptr + NUM_COUNTED, mask=inside, other=0.0) > 0
        valid = valid & (tl.load(rejected_ptr + NUM_COUNTED, mask=inside, other=0.0) > 0)
        logp_chosen, chosen, total, length, share_chosen = scores(chosen_ptr, valid, AVERAGED)
        logp_rejected, rejected, _, _, share_rejected = scores(rejected_ptr, valid, AVERAGED)
        loss, slope_chosen, slope_rejected = pair_loss(
            beta * chosen, beta * rejected, beta, label_smoothing, simpo_gamma, LOSS_TYPE
        )
        slope_chosen = pair_weight * beta * slope_chosen * share_chosen - nll_weight / length
        slope_rejected = pair_weight * beta * slope_rejected * share_rejected
        place = slopes_ptr + 2 * pairs
        tl.store(place, tl.where(valid, slope_chosen * pair_scale, 0.0), mask=inside)
        tl.store(place + 1, tl.where(valid, slope_rejected * pair_scale, 0.0), mask=inside)
        margin = beta * chosen - beta * rejected
        totals += tl.where(columns == LOSS, tl.sum(tl.where(valid, loss, 0.0), 0), 0.0)
        totals += tl.where(columns == CHOSEN, tl.sum(tl.where(valid, beta * chosen, 0.0), 0), 0.0)
        totals += tl.where(
            columns == REJECTED, tl.sum(tl.where(valid, beta * rejected, 0.0), 0), 0.0
        )
        totals += tl.where(columns == MARGIN, tl.sum(tl.where(valid, margin, 0.0), 0), 0.0)
        totals += tl.where(
            columns == ACCURACY, tl.sum(tl.where(valid & (margin > 0), 1.0, 0.0), 0), 0.0
        )
        totals += tl.where(
            columns == LOGP_CHOSEN, tl.sum(tl.where(valid, logp_chosen, 0.0), 0), 0.0
        )
        totals += tl.where(
            columns == LOGP_REJECTED, tl.sum(tl.where(valid, logp_rejected, 0.0), 0), 0.0
        )
        totals += tl.where(columns == NLL, tl.sum(tl.where(valid, -total / length, 0.0), 0), 0.0)
    totals = totals * pair_scale
    tl.store(values_ptr + columns, totals)
    coefficients = tl.where(columns == NLL, nll_weight, tl.zeros_like(totals))
    coefficients = tl.where(columns == LOSS, pair_weight, coefficients)
    terms = tl.where(coefficients == 0, 0.0, coefficients * totals)
    tl.store(loss_ptr, tl.sum(terms, 0))


@triton.jit(do_not_specialize_on_alignment=["weights_ptr", "g_logprob_ptr"])
@no_type_check
def spread_kernel(
    slopes_ptr,
    upstream_ptr,
    weights_ptr,
    cu_seqlens_ptr,
    g_logprob_ptr,
    BLOCK: tl.constexpr,  # noqa: N803
):
    """The slope of each sequence to each of its counted tokens, one sequence per program."""
    sequence = tl.program_id(0)
    first = tl.load(cu_seqlens_ptr + sequence).to(tl.int32)
    last = tl.load(cu_seqlens_ptr + sequence + 1).to(tl.int32)
    slope = tl.load(slopes_ptr + sequence) * tl.load(upstream_ptr)
    for start in range(first, last, BLOCK):
        index = start + tl.arange(0, BLOCK)
        inside = index < last
        weights = tl.load(weights_ptr + index, mask=inside, other=0.0)
        tl.store(g_logprob_ptr + index, tl.where(weights != 0, slope, 0.0), mask=inside)
