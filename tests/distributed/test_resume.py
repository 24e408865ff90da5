"""A checkpoint holds the moment it was asked for; what comes after its load is equal."""

import random

import pytest
import torch

from rl_megatron.losses import sft_objective
from tests.helpers.backend_contract import assert_same_weights, make_batch, weights_of
from tests.helpers.megatron_job import LAYOUTS, make_backend, start
from tests.helpers.tiny_model import make_tiny_hf


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_hf(tmp_path_factory.mktemp("hf"), "llama", 131, layers=4)


def step(backend):
    return backend.train_step(make_batch(), sft_objective(), lr=1e-2)


def save_and_go_on_job(layout, hf, root, background):
    """Metrics and weights after two steps beyond a save that was still being written."""
    from rl_megatron.checkpoint.publish import NewCheckpoint

    process = start(layout)
    backend = make_backend(hf, process)
    # From the third on Megatron goes by the plan of those before.
    for _ in range(3):
        backend.save(NewCheckpoint(root, 0, process).aside)
    step(backend)
    new = NewCheckpoint(root, 1, process)
    save = backend.save(new.aside, background=background)
    metrics = [step(backend), step(backend)]
    save.finish()
    assert save.is_done()
    new.publish()
    return metrics, weights_of(backend)


def resume_job(layout, hf, root):
    from rl_megatron.checkpoint.publish import iteration_folder

    backend = make_backend(hf, start(layout))
    backend.load(iteration_folder(root, 1))
    return [step(backend), step(backend)], weights_of(backend)


@pytest.mark.parametrize(
    ("layout", "background"),
    [("tp1", True), ("dp2", True), ("tp2-sp", False), ("pp2-vpp2", True), ("pp2-vpp2", False)],
)
def test_rs_04_steps_after_a_save_are_those_after_its_load(
    layout, background, folder, pool, tmp_path
):
    workers = pool(LAYOUTS[layout].world_size)
    root = tmp_path / "root"
    unbroken = workers.run(save_and_go_on_job, layout, folder, root, background)
    resumed = workers.run(resume_job, layout, folder, root)
    for (metrics, weights), (again, weights_again) in zip(unbroken, resumed, strict=True):
        assert again == metrics
        assert_same_weights(weights_again, weights)


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [("tp2", "pp2"), ("tp1", "tp2"), ("tp2-pp2", "dp2"), ("dp2", "tp1"), ("dp2", "dp4")],
)
def test_rs_04_another_layout_goes_on_with_the_same_numbers(saved, resumed, folder, pool, tmp_path):
    """Moments bit by bit: tests/distributed/test_megatron_checkpoint.py."""
    root = tmp_path / "root"
    run = pool(LAYOUTS[saved].world_size).run
    metrics, weights = run(save_and_go_on_job, saved, folder, root, True)[0]
    for again, weights_again in pool(LAYOUTS[resumed].world_size).run(
        resume_job, resumed, folder, root
    ):
        for row, other in zip(again, metrics, strict=True):
            assert row == pytest.approx(other, rel=1e-6, abs=1e-7)
        for name, value in weights.items():
            torch.testing.assert_close(weights_again[name], value, rtol=1e-5, atol=1e-6)


def full_disk_job(layout, hf, root, background):
    """What a save says where files may not grow, and what it leaves."""
    import resource

    from rl_megatron.checkpoint.publish import NewCheckpoint
    from rl_megatron.errors import CheckpointError

    process = start(layout)
    backend = make_backend(hf, process)
    new = NewCheckpoint(root, 1, process)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if process.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        backend.save(new.aside, background=background).finish()
    except CheckpointError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("background", [True, False])
def test_a_rank_that_cannot_write_fails_the_save_on_all(background, folder, pool, tmp_path):
    from rl_megatron.checkpoint.publish import read_pointer, saved_iterations

    root = tmp_path / "root"
    for said in pool(2).run(full_disk_job, "tp2", folder, root, background):
        assert "cannot be written: rank 1: " in said
    assert (read_pointer(root), saved_iterations(root)) == (None, [])


def draws():
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    with get_cuda_rng_tracker().fork():
        dropped = torch.nn.functional.dropout(torch.ones(8), 0.5).tolist()
    return [random.random(), float(torch.rand(())), *dropped]


def random_state_job(layout, root, is_resumed):
    """Draws after a save, or after a load of it."""
    from rl_megatron.checkpoint.random_state import (
        load_random_state,
        save_random_state,
        seed_random_state,
    )

    process = start(layout)
    seed_random_state(5 if is_resumed else 6, process)
    torch.manual_seed(100 + process.rank)
    if is_resumed:
        load_random_state(root, process)
    else:
        draws()
        save_random_state(root, process)
    return [draws() for _ in range(3)]


def test_rs_04_each_of_four_ranks_goes_on_with_its_own_random_numbers(pool, tmp_path):
    unbroken = pool(4).run(random_state_job, "tp2-dp2", tmp_path, False)
    assert pool(4).run(random_state_job, "tp2-dp2", tmp_path, True) == unbroken
    assert len({row[0][0] for row in unbroken}) == len({row[0][1] for row in unbroken}) == 4


def from_main_job(root):
    """What ranks know that ask the main one while another process writes."""
    process = start("dp2")

    def ask():
        (root / f"asked_{process.rank}").write_text("")
        return "seen"

    return process.from_main(ask)


def failing_main_job():
    from rl_megatron.errors import CheckpointError

    def ask():
        raise CheckpointError("not whole")

    with pytest.raises(CheckpointError, match="not whole"):
        start("dp2").from_main(ask)
    return True


def test_one_rank_looks_and_tells_all(pool, tmp_path):
    assert pool(2).run(from_main_job, tmp_path) == ["seen", "seen"]
    assert [path.name for path in tmp_path.iterdir()] == ["asked_0"]
    assert pool(2).run(failing_main_job) == [True, True]
