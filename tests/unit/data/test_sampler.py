"""The order of rows is a function of (seed, epoch, place)."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from rl_megatron.data.sampler import PositionSampler, RowCursor, data_digest
from rl_megatron.errors import CheckpointError
from rl_megatron.interfaces.records import Prompt


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


def cursor(num_rows: int, digest: str = "A", may_change: bool = False) -> RowCursor:
    return RowCursor(PositionSampler(num_rows, seed=1, shuffle=True), digest, may_change)


def test_rs_02_prompts_in_flight_are_drawn_again() -> None:
    """0..3 trained and 4, 5 generated when the run stopped: each is trained once over the run."""
    first = cursor(10)
    trained = first.take(4)
    in_flight = first.peek(2)
    resumed = cursor(10)
    resumed.load_state_dict(first.state_dict())
    rest = resumed.take(6)
    assert rest[:2] == in_flight
    assert sorted(trained + rest) == list(range(10))
    assert resumed.peek(1, skip=3) == cursor(10).peek(1, skip=13)


@pytest.mark.parametrize("num_rows", [20, 4])
def test_rs_02_other_rows_are_refused_or_begun_with_the_first(num_rows: int, caplog) -> None:
    saved = cursor(10)
    saved.take(6)
    with pytest.raises(CheckpointError) as error:
        cursor(num_rows, "B").load_state_dict(saved.state_dict())
    assert str(error.value) == (
        f"data.train has other rows than when the run was saved: {num_rows} now, 10 then. Give it "
        "those of then, or set checkpoint.allow_changes=[data.train] to go on with the first of "
        "the new rows."
    )
    allowed = cursor(num_rows, "B", may_change=True)
    allowed.load_state_dict(saved.state_dict())
    assert allowed.take(4) == cursor(num_rows).take(4)
    assert "goes on with the first of the new rows" in caplog.text


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


def test_rs_02_everything_in_a_row_counts() -> None:
    row = Prompt(3, (1, 2), "1+1=", "2", {"level": 1})
    others = [
        replace(row, token_ids=(1, 3)),
        replace(row, answer="3"),
        replace(row, answer=None),
        replace(row, extra={"level": 2}),
    ]
    digests = {data_digest([other]) for other in [row, replace(row), *others]}
    assert len(digests) == 1 + len(others)
