"""One rank of tools/parity.py: takes a step for every row and case of this number of ranks.

    torchrun --nproc-per-node 2 -m tools.parity_job FOLDER NAME_OF_A_ROW ...

Reads FOLDER/<model> and FOLDER/<model>.pt, its batches, and writes FOLDER/<name of row>.pt.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import torch

from rl_megatron import log
from rl_megatron.interfaces.batch import PackedBatch
from rl_megatron.parallel.process import stop
from tools.parity_backends import Trained, make_trained
from tools.parity_cases import (
    REFERENCES,
    ROWS,
    Case,
    Row,
)
from tools.parity_compare import Result
from tools.parity_data import lonely


def main(arguments: Sequence[str]) -> None:
    """The rank."""
    folder, names = Path(arguments[0]), arguments[1:]
    log.silence_megatron_warnings()
    torch.set_num_threads(1)
    rows = [row for row in (*REFERENCES, *ROWS) if row.name in names]
    for _, together in groupby(rows, key=lambda row: row.model_key):
        members = list(together)
        model = members[0].model
        trained = make_trained(members[0], folder / model)
        batches = torch.load(folder / f"{model}.pt", weights_only=False)
        for row in members:
            results = run_row(trained, row, row.cases, batches)
            if trained.process.is_main:
                torch.save(results, folder / f"{row.name}.pt")
                print(f"parity: {row.name}", flush=True)
        trained.backend.close()
    stop()


def run_row(
    trained: Trained, row: Row, cases: Sequence[Case], batches: dict[bool, PackedBatch]
) -> dict[str, Result]:
    """Result of one step by name of case; the weights stay as they are."""
    backend = trained.backend
    backend.micro_batching = row.micro_batching
    batches = lonely(batches) if row.lonely else batches
    results = {}
    for case in cases:
        metrics = backend.train_step(case.batch(batches), case.objective, lr=0.0)
        results[case.name] = metrics, trained.gradients()
    return results


if __name__ == "__main__":
    main(sys.argv[1:])
