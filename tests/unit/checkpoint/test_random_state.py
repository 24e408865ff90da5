"""The generators of a rank go on where they were (RS-04; ranks of a job in tests/distributed)."""

import random

import numpy as np
import pytest
import torch

from rl_megatron.checkpoint.random_state import (
    FOLDER,
    load_random_state,
    save_random_state,
    seed_random_state,
)
from rl_megatron.errors import CheckpointError
from rl_megatron.parallel.layout import Layout
from rl_megatron.parallel.process import Process


def rank(number):
    return Process(Layout(data=4), number, torch.device("cpu"))


@pytest.fixture(autouse=True)
def generators():
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])


def draws():
    # A normal number of NumPy leaves half of a pair behind.
    return [random.random(), float(np.random.normal()), float(torch.rand(()))]


def test_every_generator_begins_with_the_seed():
    for number in (0, 3):
        seed_random_state(7, rank(number))
        first = draws()
        draws()
        seed_random_state(7, rank(number))
        assert draws() == first


def test_the_next_draws_are_those_of_the_unbroken_run(tmp_path):
    seed_random_state(7, rank(0))
    draws()
    save_random_state(tmp_path, rank(0))
    expected = [draws(), draws()]
    seed_random_state(8, rank(0))
    torch.manual_seed(3)
    load_random_state(tmp_path, rank(0))
    assert [draws(), draws()] == expected


def test_ranks_draw_differently():
    found = set()
    for number in range(4):
        seed_random_state(7, rank(number))
        found |= {random.random(), float(np.random.normal())}
    assert len(found) == 8


def test_a_file_that_is_missing_or_broken_is_named(tmp_path):
    save_random_state(tmp_path, rank(0))
    with pytest.raises(CheckpointError, match=r"rank_00001.*random state of rank 1"):
        load_random_state(tmp_path, rank(1))
    (tmp_path / FOLDER / "rank_00000.safetensors").write_bytes(b"123")
    with pytest.raises(CheckpointError, match="rank_00000"):
        load_random_state(tmp_path, rank(0))
