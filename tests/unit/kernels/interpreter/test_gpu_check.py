"""The script for a GPU, run on small sizes where Triton interprets."""

import torch

from tools.bench.gpu_check import table_of
from tools.bench.gpu_errors import Finding, head_errors, loss_errors, tile_errors
from tools.bench.gpu_speed import Sizes, head_speed, row_speed

CPU = torch.device("cpu")


def test_nothing_is_wrong():
    findings = [*tile_errors(CPU, 515, None, "x"), *head_errors(CPU), *loss_errors(CPU)]
    wrong = [finding for finding in findings if finding.is_wrong]
    assert len(findings) == 4 + 8 + 18
    # The interpreter cuts bf16 off where a GPU rounds it.
    assert not [finding for finding in wrong if "bfloat16" not in finding.name], wrong
    assert table_of(findings, "CPU").row_count == len(findings)


def test_speeds_are_measured():
    sizes = Sizes(tokens=2, hidden=16, vocab=64)
    found = [*row_speed(CPU, sizes), *head_speed(CPU, sizes)]
    assert len(found) == 5 + 6 and all(finding.value > 0 for finding in found)


def test_what_is_no_number_is_wrong():
    assert Finding("x", float("nan"), "", 1.0).is_wrong and Finding("x", 2.0, "", 1.0).is_wrong
    assert not Finding("x", 1.0, "", 1.0).is_wrong and not Finding("x", 1e9, "").is_wrong
