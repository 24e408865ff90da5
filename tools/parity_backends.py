"""The backends that tools/parity.py compares, and the gradient that a step leaves in each."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Parameter

from rl_megatron.backends.transformers_backend import TransformersBackend
from rl_megatron.config.deepspeed import DeepSpeedConfig
from rl_megatron.config.optimizer import OptimizerConfig
from rl_megatron.models.families import read_shape, weight_rules
from rl_megatron.models.transformers_model import file_weights
from rl_megatron.parallel.process import Process, start_data_parallel, start_megatron
from tools.parity_cases import Row
from tools.parity_data import BALANCE, TEMPERATURE, VOCAB_DIVISOR

if TYPE_CHECKING:
    from rl_megatron.backends.deepspeed import DeepSpeedBackend
    from rl_megatron.backends.megatron import MegatronBackend
    from rl_megatron.backends.torch import TorchBackend

# Nothing clips the gradient. Where it is not kept after a step, Adam's first moment is it: without
# memory, that is all that is in it.
OPTIMIZER = OptimizerConfig(clip_grad=0.0, adam_beta1=0.0)
# Of a small model ZeRO-3 would share nothing otherwise.
SHARE_ALL = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}


@dataclass(frozen=True)
class Trained:
    """A model of the job.

    Attributes:
        backend: It; its weights stay as they are while lr is 0.
        process: This rank.
        gradients: The whole gradient of the last step, float32, under Hugging Face names.
            Collective.
    """

    backend: MegatronBackend | TransformersBackend
    process: Process
    gradients: Callable[[], dict[str, Tensor]]


def make_trained(row: Row, folder: Path) -> Trained:
    """The model of a row from its folder. Collective."""
    return {"megatron": _megatron, "deepspeed": _deepspeed, "torch": _torch}[row.backend](
        row, folder
    )


def _megatron(row: Row, folder: Path) -> Trained:
    """The distributed optimizer would leave each rank a part of the gradient."""
    process = start_megatron(row.layout, seed=0)
    from rl_megatron.backends.megatron import MegatronBackend
    from rl_megatron.checkpoint.hf_load import load_hf_weights
    from rl_megatron.models.gpt import build_model

    shape = read_shape(folder)
    rules = weight_rules(shape, VOCAB_DIVISOR)
    chunks = build_model(shape, process, row.dtype, VOCAB_DIVISOR, TEMPERATURE)
    load_hf_weights(chunks, rules, folder, process)
    backend = MegatronBackend(
        chunks,
        rules,
        process,
        row.micro_batching,
        OPTIMIZER,
        distributed_optimizer=False,
        moe_aux_loss_coeff=BALANCE if row.balance else 0.0,
    )
    return Trained(backend, process, lambda: megatron_gradients(backend))


def _deepspeed(row: Row, folder: Path) -> Trained:
    process = start_data_parallel()
    from rl_megatron.backends.deepspeed import open_deepspeed

    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(SHARE_ALL, file)
        file.flush()
        config = DeepSpeedConfig(zero_stage=row.zero_stage, config_path=file.name)
        backend = open_deepspeed(
            folder, process, row.micro_batching, config, TEMPERATURE, row.dtype, OPTIMIZER
        )
    return Trained(backend, process, lambda: deepspeed_gradients(backend))


def _torch(row: Row, folder: Path) -> Trained:
    process = start_data_parallel()
    from rl_megatron.backends.torch import TorchBackend

    backend = TorchBackend(folder, process, row.micro_batching, TEMPERATURE, row.dtype, OPTIMIZER)
    return Trained(backend, process, lambda: torch_gradients(backend))


@torch.no_grad()
def megatron_gradients(backend: MegatronBackend) -> dict[str, Tensor]:
    """As long as it takes, weights are gradients.

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


def deepspeed_gradients(backend: DeepSpeedBackend) -> dict[str, Tensor]:
    """Adam's first moments, put together from the pieces of all ranks."""
    assert backend._state is not None
    held = [
        (piece.name, piece.shape, piece.start, piece.tensors["exp_avg"].clone())
        for piece in backend._state.pieces(is_loading=False)
    ]
    whole: dict[str, Tensor] = {}
    for name, shape, start, part in sum(backend.process.gather(held), []):
        found = whole.setdefault(name, torch.full((math.prod(shape),), math.nan).view(shape))
        found.view(-1)[start : start + part.numel()] = part
    return dict(_under_file_names(backend, whole))


def torch_gradients(backend: TorchBackend) -> dict[str, Tensor]:
    """Those of the main weights, which stay until the next step."""
    names = [name for name, _ in backend.module.named_parameters()]
    found = zip(names, backend._trained.main_weights, strict=True)
    return dict(_under_file_names(backend, {name: main.grad.clone() for name, main in found}))


def _under_file_names(
    backend: TransformersBackend, gradients: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Those of parameters of the backend's module, as the weights in files have them."""
    for name, value in gradients.items():
        yield from file_weights(backend.module.model, name.removeprefix("model."), value)
