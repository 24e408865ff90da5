"""Megatron models and backends inside the processes of a pool, on layouts by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rl_megatron.config.optimizer import OptimizerConfig
from rl_megatron.data.packing import MicroBatching
from rl_megatron.models.families import read_shape, weight_rules
from rl_megatron.parallel.layout import Layout
from rl_megatron.parallel.process import Process, start_megatron
from tests.helpers.backend_contract import OPTIMIZER, TEMPERATURE, WHOLE

if TYPE_CHECKING:
    from rl_megatron.backends.megatron import MegatronBackend

LAYOUTS: dict[str, Layout] = {
    "tp1": Layout(),
    "tp2": Layout(tensor=2),
    "tp2-sp": Layout(tensor=2, sequence_parallel=True),
    "pp2": Layout(pipeline=2),
    "dp2": Layout(data=2),
    "dp4": Layout(data=4),
    "pp2-vpp2": Layout(pipeline=2, virtual=2),
    "tp2-pp2": Layout(tensor=2, pipeline=2),
    "tp2-pp2-sp": Layout(tensor=2, pipeline=2, sequence_parallel=True),
    "tp2-dp2": Layout(tensor=2, data=2),
    "cp2": Layout(context=2),
    "cp2-tp2-sp": Layout(context=2, tensor=2, sequence_parallel=True),
    "pp2-uneven": Layout(pipeline=2, first_stage_layers=3, last_stage_layers=5),
    "pp4-uneven": Layout(pipeline=4, first_stage_layers=1, last_stage_layers=3),
    "pp2-vpp2-uneven": Layout(pipeline=2, virtual=2, first_stage_layers=6, last_stage_layers=2),
    "pp2-vpp2-last": Layout(pipeline=2, virtual=2, last_stage_layers=2),
    "ep2": Layout(data=2, expert=2),
    "ep4": Layout(data=4, expert=4),
    "ep2-dp2": Layout(data=4, expert=2),
    "ep2-tp2-sp": Layout(tensor=2, data=2, expert=2, sequence_parallel=True),
    "ep2-pp2": Layout(pipeline=2, data=2, expert=2),
    "ep2-cp2": Layout(context=2, expert=2),
}
# 131 tokens become 136 on one tensor-parallel rank and 144 on two.
VOCAB_DIVISOR = 8

_last: list[Process] = []
_made: list[MegatronBackend] = []


def start(layout: str) -> Process:
    """The process in a layout; Megatron's groups of the job before serve again if they can."""
    from megatron.core import parallel_state

    # Other tests make groups of their own.
    if not _last or not (
        _last[0].layout == LAYOUTS[layout]
        and parallel_state.get_tensor_model_parallel_group() is _last[0].tensor_group
    ):
        # What a test left open would keep the groups of its layout, and their threads, alive.
        for backend in _made:
            backend.close()
        _made.clear()
        _last.clear()
        _last.append(start_megatron(LAYOUTS[layout], seed=0))
    return _last[0]


def make_backend(
    folder: Path,
    process: Process,
    micro_batching: MicroBatching = WHOLE,
    optimizer: OptimizerConfig | None = OPTIMIZER,
    *,
    temperature: float = TEMPERATURE,
    dtype: torch.dtype = torch.float32,
    recompute: str = "none",
    distributed_optimizer: bool = True,
    one_pass: bool = False,
    moe_aux_loss_coeff: float = 0.0,
    head: Tensor | None = None,
) -> MegatronBackend:
    """A backend with the weights of a model folder; with a scalar `head` in place of its own."""
    # Here, so that the process of pytest does without Megatron.
    from rl_megatron.backends.megatron import MegatronBackend
    from rl_megatron.checkpoint.hf_load import load_hf_weights
    from rl_megatron.models.gpt import build_model

    shape = read_shape(folder)
    if head is not None:
        shape = replace(shape, scalar_head=True)
    rules = weight_rules(shape, VOCAB_DIVISOR)
    chunks = build_model(shape, process, dtype, VOCAB_DIVISOR, temperature, recompute)
    load_hf_weights(chunks, rules, folder, process, head=head)
    backend = MegatronBackend(
        chunks,
        rules,
        process,
        micro_batching,
        optimizer,
        distributed_optimizer,
        one_pass,
        moe_aux_loss_coeff,
    )
    _made.append(backend)
    return backend


def parameters_of(backend: MegatronBackend) -> list[Tensor]:
    """Copies of this rank's parameters, on the host."""
    return [p.detach().to("cpu", copy=True) for c in backend.chunks for p in c.parameters()]


@torch.no_grad()
def gradients_of(backend: MegatronBackend) -> dict[str, Tensor]:
    """The gradient of the last step under Hugging Face names, whole. Overwrites the weights.

    Only without clipping (which scales it in place) and without the distributed optimizer (which
    leaves each data-parallel rank its own part).
    """
    for chunk in backend.chunks:
        for parameter in chunk.parameters():
            parameter.copy_(parameter.main_grad)  # type: ignore[attr-defined]
    return {name: value.clone() for name, value in backend.named_weights()}


def bits_of(tensors: Any) -> list[Tensor]:
    """Each tensor as integers, so that NaN equals itself."""
    return [t.contiguous().view(torch.uint8) for t in tensors]
