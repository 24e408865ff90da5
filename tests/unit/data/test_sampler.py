"""The order of rows is a function of (seed, epoch, place)."""

import random

import numpy as np
import pytest
import torch

from rl_megatron.data.sampler import PositionSampler, data_digest


def test_every_epoch_is_a_permutation_of_its_own() -> None:
    sampler = PositionSampler(50, seed=3, shuffle=True)
    epochs = [sampler.take(epoch * 50, 50) for epoch in range(3)]
    assert all(sorted(rows) == list(range(50)) for rows in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_without_shuffling_rows_come_in_their_own_order() -> None:
    assert PositionSampler(3, seed=3, shuffle=False).take(1, 6) == [1, 2, 0, 1, 2, 0]


def test_the_order_is_fixed_for_good() -> None:
    """A change of these numbers would change the data of every run that is resumed."""
    epochs = [[0, 2, 1, 5, 4, 3, 6, 7], [5, 3, 7, 2, 4, 1, 0, 6]]
    assert PositionSampler(8, seed=0, shuffle=True).take(0, 16) == epochs[0] + epochs[1]


@pytest.mark.parametrize("batch_size", [1, 3, 7, 20])
def test_batches_of_any_size_walk_through_the_same_order(batch_size: int) -> None:
    """Batches straddle the ends of epochs."""
    whole = PositionSampler(7, seed=5, shuffle=True).take(0, 60)
    sampler = PositionSampler(7, seed=5, shuffle=True)
    parts = [sampler.take(start, batch_size) for start in range(0, 60, batch_size)]
    assert [row for part in parts for row in part][:60] == whole


def test_a_place_does_not_depend_on_what_was_asked_before() -> None:
    fresh = PositionSampler(7, seed=5, shuffle=True).row(40)
    used = PositionSampler(7, seed=5, shuffle=True)
    used.take(0, 30)
    assert used.row(40) == fresh
    assert used.take(0, 7) == PositionSampler(7, seed=5, shuffle=True).take(0, 7)


def test_seeds_differ() -> None:
    orders = {tuple(PositionSampler(20, seed, True).take(0, 20)) for seed in range(10)}
    assert len(orders) == 10


def test_all_orders_are_about_equally_likely() -> None:
    """3 rows have 6 orders; 600 seeds give each about 100 times (standard deviation 9.1)."""
    orders = [tuple(PositionSampler(3, seed, True).take(0, 3)) for seed in range(600)]
    counts = [orders.count(order) for order in sorted(set(orders))]
    assert len(counts) == 6 and min(counts) > 60 and max(counts) < 140


def test_no_global_random_stream_is_touched() -> None:
    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    PositionSampler(100, seed=0, shuffle=True).take(0, 250)
    after = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    assert before == after


def test_rs_02_prompts_in_flight_are_drawn_again() -> None:
    """0..3 trained and 4, 5 generated when the run stopped: the position is 4."""
    sampler = PositionSampler(10, seed=1, shuffle=True)
    trained = sampler.take(0, 4)
    sampler.take(4, 2)  # Generated, not trained.
    resumed = PositionSampler(10, seed=1, shuffle=True).take(4, 6)
    assert sorted(trained + resumed) == list(range(10))


def test_rs_02_other_data_have_another_digest() -> None:
    digest = data_digest([(1, 2), (3,)])
    assert digest == data_digest([[1, 2], [3]])
    others = [
        [(1, 2)],
        [(1, 2), (4,)],
        [(3,), (1, 2)],
        [(1,), (2, 3)],
        [(1, 2, 3)],
        [(1, 2), (3,), ()],
    ]
    assert digest not in {data_digest(other) for other in others}
