import math

import pytest
import torch

from rl_megatron.losses.sums import (
    counted_tokens,
    counted_values,
    masked_sum,
    segment_sum,
    zero_outside,
)
from tests.helpers.packed import packed


def test_segment_sum_of_unequal_and_empty_sequences():
    sums = segment_sum(torch.tensor([1.0, 2, 4, 8, 16]), torch.tensor([0, 2, 2, 5]))
    assert sums.dtype == torch.float64
    assert sums.tolist() == [3.0, 0.0, 28.0]


@pytest.mark.parametrize(("bounds", "expected"), [([0], []), ([0, 0, 0], [0.0, 0.0])])
def test_segment_sum_of_nothing(bounds, expected):
    values = torch.zeros(0, requires_grad=True)
    sums = segment_sum(values, torch.tensor(bounds))
    assert sums.tolist() == expected
    sums.sum().backward()
    assert values.grad is not None and values.grad.shape == (0,)


@pytest.mark.parametrize("index_type", [torch.int32, torch.int64])
def test_segment_sum_takes_either_index_type_and_counts_bools(index_type):
    sums = segment_sum(torch.tensor([True, False, True]), torch.tensor([0, 1, 3], dtype=index_type))
    assert sums.tolist() == [1.0, 1.0]


def test_segment_sum_gives_each_token_the_gradient_of_its_sequence():
    values = torch.randn(6, requires_grad=True)
    coefficients = torch.tensor([2.0, -3.0, 5.0], dtype=torch.float64)
    (segment_sum(values, torch.tensor([0, 1, 1, 6])) * coefficients).sum().backward()
    assert values.grad.tolist() == [2.0, 5.0, 5.0, 5.0, 5.0, 5.0]


def test_lp_06_long_bf16_response_is_summed_without_stalling():
    values = torch.full((4096,), -0.01, dtype=torch.bfloat16)
    sums = segment_sum(values, torch.tensor([0, 4096]))
    assert sums.tolist() == [-41.0]


def test_dpo_13_boundaries_of_packed_rows_keep_sums_apart():
    logprobs = torch.tensor([-99, -0.5, -0.25, -99, -1.0, -99, -7, -2.0, -0.125])
    mask = torch.tensor([0, 1, 1, 0, 1, 0, 0, 1, 1], dtype=torch.bool)
    sums = segment_sum(zero_outside(mask, logprobs), torch.tensor([0, 3, 5, 9]))
    assert sums.tolist() == [-0.75, -1.0, -2.125]


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_masked_sum_ignores_what_has_no_weight(garbage):
    values = torch.tensor([0.5, garbage, 2.0], requires_grad=True)
    total = masked_sum(values, torch.tensor([0.5, 0.0, 0.25]))
    total.backward()
    assert total.dtype == torch.float64
    assert total.item() == 0.75
    assert values.grad.tolist() == [0.5, 0.0, 0.25]


def test_masked_sum_takes_a_mask():
    assert masked_sum(torch.tensor([1.0, 7.0]), torch.tensor([True, False])).item() == 1.0


def test_zero_outside_keeps_the_gradient_finite_through_later_arithmetic():
    values = torch.tensor([1.0, -math.inf, math.nan], requires_grad=True)
    kept = zero_outside(torch.tensor([True, False, False]), values)
    (kept.exp() + kept.square()).sum().backward()
    assert values.grad.tolist() == pytest.approx([math.e + 2, 0.0, 0.0])


def test_a_token_counts_only_with_mask_and_weight():
    batch = packed([[0, 1, 1]], loss_weights=[1.0, 0.0, 0.5], ref_logprobs=[1.0, 2.0, 3.0])
    assert counted_tokens(batch).tolist() == [False, False, True]
    assert counted_values(batch, "ref_logprobs").tolist() == [0.0, 0.0, 3.0]


def test_a_missing_field_is_named():
    batch = packed([[0, 1]], loss_weights=[0.0, 1.0])
    with pytest.raises(AssertionError, match="old_logprobs"):
        counted_values(batch, "old_logprobs")
    with pytest.raises(AssertionError, match="weigh"):
        counted_tokens(packed([[0, 1]]))
