"""A slice of `make parity`, through the same functions: two losses on four rows."""

import pytest
import torch

from rl_megatron.parallel.process import start_megatron
from tools.parity import compare
from tools.parity_cases import CASES, ROWS, make_batches, make_model, reference_of

LOSSES = ("GSPO, seq-mean-token-mean", "DPO+NLL, pairs")
NAMES = (
    "TP2+SP: 2 packed",
    "PP2xVPP2: all padded",
    "CP2: 2 packed",
    "DP2: 1 packed, idle rank",
)
BY_NAME = {row.name: row for row in ROWS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("parity")
    torch.save(make_batches(make_model(made / "dense", "dense")), made / "dense.pt")
    return made


def results_job(row, folder):
    from tools.parity_job import make_backend, run_row

    process = start_megatron(row.layout, seed=0)
    backend = make_backend(folder / row.model, process)
    cases = [case for case in CASES if case.name in LOSSES]
    results = run_row(
        backend, row, cases, torch.load(folder / f"{row.model}.pt", weights_only=False)
    )
    backend.close()
    return results


@pytest.fixture(scope="module")
def expected(folder, pool):
    def results(row):
        return pool(1).run(results_job, reference_of(row), folder)[0]

    found = {reference_of(BY_NAME[name]).name: reference_of(BY_NAME[name]) for name in NAMES}
    return {name: results(row) for name, row in found.items()}


@pytest.mark.parametrize("name", NAMES)
def test_two_losses_are_those_of_one_rank(name, folder, expected, pool):
    row = BY_NAME[name]
    want = expected[reference_of(row).name]
    for found in pool(row.layout.world_size).run(results_job, row, folder):
        assert list(found) == list(LOSSES)
        for loss, result in found.items():
            difference = compare(result, want[loss])
            assert difference.within_bounds, (loss, difference)


def test_a_gradient_that_is_counted_twice_is_found(expected):
    metrics, gradients = expected[reference_of(BY_NAME[NAMES[0]]).name][LOSSES[0]]
    name = "model.layers.3.post_attention_layernorm.weight"
    doubled = gradients | {name: 2 * gradients[name]}
    difference = compare((metrics, doubled), (metrics, gradients))
    assert (difference.parameter, difference.within_bounds) == (name, False)
