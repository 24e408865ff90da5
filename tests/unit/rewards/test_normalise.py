"""Normalised scores: by hand, gaps, and nothing to divide by."""

import pytest

from rl_megatron.rewards import normalise


def test_fixed_is_an_affine_map():
    assert normalise.fixed(1.0, 2.0)([3.0, None, -1.0]) == [1.0, None, -1.0]


def test_a_batch_has_mean_0_and_unbiased_deviation_1():
    # Mean 2, squared deviations 1, 0, 1 over n - 1 = 2.
    assert normalise.batch([1.0, 2.0, None, 3.0]) == pytest.approx([-1.0, 0.0, None, 1.0])


@pytest.mark.parametrize("values", [[2.0, 2.0, None], [5.0], [], [None]])
def test_nothing_to_divide_by_is_0(values):
    assert normalise.batch(values) == [None if v is None else 0.0 for v in values]
