"""A slice of `make parity`, through the same functions: two losses on a few rows."""

import pytest
import torch

from tools.parity_cases import EVERY_LOSS, REFERENCES, ROWS, reference_of
from tools.parity_compare import BOUNDS, compare
from tools.parity_data import make_batches, make_model

LOSSES = [case.name for case in EVERY_LOSS if case.loss in ("GSPO", "DPO+NLL")]
NAMES = (
    "TP2+SP: 2 packed",
    "PP2xVPP2: all padded",
    "CP2: 2 packed",
    "DP2: 1 packed, idle rank",
    "TP2+SP: 1 packed, bf16",
    "CP2: 1 packed, bf16",
    "torch: all padded",
    "ZeRO-0 x2: 2 packed",
    "ZeRO-2 x2: all padded",
    "ZeRO-3 x2: 1 packed, idle rank",
    "ZeRO-1 x2: 1 packed, bf16",
)
BY_NAME = {row.name: row for row in ROWS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("parity")
    torch.save(make_batches(make_model(made / "dense", "dense")), made / "dense.pt")
    return made


def results_job(row, folder):
    from tools.parity_backends import make_trained
    from tools.parity_job import run_row

    trained = make_trained(row, folder / row.model)
    cases = [case for case in EVERY_LOSS if case.name in LOSSES]
    batches = torch.load(folder / f"{row.model}.pt", weights_only=False)
    results = run_row(trained, row, cases, batches)
    trained.backend.close()
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
        assert list(found) == LOSSES
        for loss, result in found.items():
            difference = compare(result, want[loss])
            assert difference.within(BOUNDS[row.dtype]), (loss, difference)


def test_a_gradient_that_is_counted_twice_is_found(expected):
    metrics, gradients = expected[reference_of(BY_NAME[NAMES[0]]).name][LOSSES[0]]
    name = "model.layers.3.post_attention_layernorm.weight"
    doubled = gradients | {name: 2 * gradients[name]}
    difference = compare((metrics, doubled), (metrics, gradients))
    assert (difference.parameter, difference.within(BOUNDS[torch.bfloat16])) == (name, False)


def test_what_bf16_does_to_one_rank_is_half_of_what_a_split_may(expected):
    rounded = next(row for row in REFERENCES if row.is_bf16)
    exact = reference_of(BY_NAME[NAMES[0]])
    for loss in LOSSES:
        difference = compare(expected[rounded.name][loss], expected[exact.name][loss])
        half = BOUNDS[torch.bfloat16]
        assert 0.01 < difference.gradient < half.gradient / 2, (loss, difference)
        assert max(difference.loss, difference.metric) < half.metric / 2, (loss, difference)
