"""One rank of tools/parity.py: takes a step for every row and case of this number of ranks.

    torchrun --nproc-per-node 2 -m tools.parity_job FOLDER NAME_OF_A_ROW ...

Reads FOLDER/<model> and FOLDER/<model>.pt, its batches, and writes FOLDER/<name of row>.pt.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Parameter

from rl_megatron import log
from rl_megatron.config.optimizer import OptimizerConfig
from rl_megatron.interfaces.batch import PackedBatch
from rl_megatron.models.families import read_shape, weight_rules
from rl_megatron.parallel.process import Process, start_megatron, stop
from tools.parity_cases import (
    REFERENCES,
    ROWS,
    Case,
    Row,
)
from tools.parity_compare import Result
from tools.parity_data import BALANCE, TEMPERATURE, VOCAB_DIVISOR, lonely

if TYPE_CHECKING:
    from rl_megatron.backends.megatron import MegatronBackend


def main(arguments: Sequence[str]) -> None:
    """The rank."""
    folder, names = Path(arguments[0]), arguments[1:]
    log.silence_megatron_warnings()
    torch.set_num_threads(1)
    rows = [row for row in (*REFERENCES, *ROWS) if row.name in names]
    for (layout, model, dtype, balance), members in groupby(rows, key=lambda row: row.model_key):
        process = start_megatron(layout, seed=0)
        backend = make_backend(folder / model, process, dtype, balance)
        batches = torch.load(folder / f"{model}.pt", weights_only=False)
        for row in members:
            results = run_row(backend, row, row.cases, batches)
            if process.is_main:
                torch.save(results, folder / f"{row.name}.pt")
                print(f"parity: {row.name}", flush=True)
        backend.close()
    stop()


def make_backend(
    folder: Path, process: Process, dtype: torch.dtype = torch.float32, balance: bool = False
) -> MegatronBackend:
    """The model in the layout of the process, with an optimizer that leaves gradients as they are.

    It neither clips nor, as the distributed one does, leaves each rank a part of the gradient.
    """
    from rl_megatron.backends.megatron import MegatronBackend
    from rl_megatron.checkpoint.hf_load import load_hf_weights
    from rl_megatron.models.gpt import build_model

    shape = read_shape(folder)
    rules = weight_rules(shape, VOCAB_DIVISOR)
    chunks = build_model(shape, process, dtype, VOCAB_DIVISOR, TEMPERATURE)
    load_hf_weights(chunks, rules, folder, process)
    return MegatronBackend(
        chunks,
        rules,
        process,
        REFERENCES[0].micro_batching,
        OptimizerConfig(clip_grad=0.0),
        distributed_optimizer=False,
        moe_aux_loss_coeff=BALANCE if balance else 0.0,
    )


def run_row(
    backend: MegatronBackend, row: Row, cases: Sequence[Case], batches: dict[bool, PackedBatch]
) -> dict[str, Result]:
    """Result of one step by name of case; the weights stay as they are."""
    backend.micro_batching = row.micro_batching
    batches = lonely(batches) if row.lonely else batches
    results = {}
    for case in cases:
        metrics = backend.train_step(case.batch(batches), case.objective, lr=0.0)
        results[case.name] = metrics, gradients_of(backend)
    return results


@torch.no_grad()
def gradients_of(backend: MegatronBackend) -> dict[str, Tensor]:
    """The gradient of the last step, whole, float32: as long as it takes, weights are gradients.

    Others take their places in the modules; a weight that is given another dtype would lose the
    hooks that collect its gradient.
    """
    places = [module._parameters for chunk in backend.chunks for module in chunk.modules()]
    weights = [dict(place) for place in places]
    for place in places:
        for name, weight in place.items():
            if weight is not None:
                place[name] = Parameter(weight.main_grad, requires_grad=False)  # type: ignore[attr-defined]
    gradients = {name: value.clone() for name, value in backend.named_weights()}
    for place, before in zip(places, weights, strict=True):
        place.update(before)
    return gradients


if __name__ == "__main__":
    main(sys.argv[1:])
