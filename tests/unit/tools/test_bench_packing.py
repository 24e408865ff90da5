"""What the bench of packing measures is what packing promises."""

import pytest

from rl_megatron.data.packing import MicroBatching
from rl_megatron.parallel.layout import Layout
from tools.bench.packing import (
    BUDGET,
    LAYOUTS,
    LONGEST,
    MEDIAN,
    PACKED,
    PADDED,
    SEQUENCES,
    draw_lengths,
    measure_efficiency,
    plan,
)


def test_lengths_are_those_of_the_distribution():
    lengths = draw_lengths(20_000)
    assert sorted(lengths)[10_000] == pytest.approx(MEDIAN, rel=0.03)
    assert max(lengths) == LONGEST
    assert 0.001 < lengths.count(LONGEST) / len(lengths) < 0.02


@pytest.mark.parametrize("layout", LAYOUTS)
def test_computed_tokens_are_real_ones(layout):
    found = measure_efficiency(draw_lengths(SEQUENCES), layout, "packed", PACKED)
    assert found.share >= 0.97
    # Beyond what one rank needs, every rank has the same number of micro-batches.
    multiple = LAYOUTS[layout].data * LAYOUTS[layout].micro_batch_multiple
    assert found.real / (found.micro_batches * BUDGET) >= 0.97 - multiple / found.micro_batches


def test_one_rank_fills_its_budget():
    found = measure_efficiency(draw_lengths(SEQUENCES), "one rank", "packed", PACKED)
    assert found.real / (found.micro_batches * BUDGET) >= 0.97
    assert found.real / found.attended >= 0.97


def test_padding_and_tails_are_counted():
    assert plan([3, 1, 5], MicroBatching(micro_batch_size=3, packed=False), Layout()) == [[5] * 3]
    padded = measure_efficiency([3, 5], "one rank", "padded", PADDED)
    assert (padded.real, padded.computed) == (8, 10)
    # 4 tensor ranks x 2 halves x 2 context ranks.
    split = measure_efficiency([3, 14], "TP4+SP x CP2", "packed", PACKED)
    assert (split.real, split.computed, split.share) == (17, 32, 17 / 32)
    # Seven of eight ranks have nothing, and compute one token each.
    idle = measure_efficiency([3], "DP8", "packed", PACKED)
    assert (idle.micro_batches, idle.computed) == (8, 10)
