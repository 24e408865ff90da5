"""The plan of the memory table, by hand."""

import time

import pytest

from tools.bench.zero_memory import BUCKET_ELEMENTS, MIB, Peak, plan_mib

# A model of 1 Mi parameters, of which its largest module has a quarter.
N, LARGEST = MIB, MIB // 4
BUCKETS = 8 * BUCKET_ELEMENTS / MIB


@pytest.mark.parametrize(
    ("stage", "ranks", "expected"),
    [
        # Weights, gradients and a copy to reduce them, two moments: on every rank.
        (0, 1, 4 + 8 + 8),
        (0, 8, 4 + 8 + 8),
        # Main weights, moments and the stepped gradient are shared: 16 bytes over two ranks.
        (1, 2, 4 + 4 + 8 + BUCKETS),
        # So are gradients,
        (2, 2, 4 + (4 + 16) / 2 + BUCKETS),
        # and weights, but for a module at a time, forward and backward.
        (3, 4, (4 + 4 + 16) / 4 + BUCKETS + 8 / 4),
    ],
)
def test_plan(stage, ranks, expected):
    assert plan_mib(stage, ranks, N, LARGEST) == pytest.approx(expected)


def test_the_peak_is_what_was_there_for_a_moment():
    peak = Peak()
    held = bytearray(b"x" * (64 * MIB))
    time.sleep(0.05)
    del held
    assert 60 < peak.stop() < 140
