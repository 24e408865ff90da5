"""Whole weights of a model whose parameters may be sharded over the ranks: in, and out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rl_megatron.backends.deepspeed.package import load_deepspeed
from rl_megatron.checkpoint.hf_files import HFWeights
from rl_megatron.models.fresh_head import HEAD, SCORE
from rl_megatron.models.outline import read_outline
from rl_megatron.models.transformers_bare import bare_transformers_model
from rl_megatron.models.transformers_model import file_weights, named_tensors, saved_buffers
from rl_megatron.parallel.process import Process


@contextmanager
def gathered(parameter: nn.Parameter, *, changes: bool = False) -> Iterator[None]:
    """Inside, the parameter is whole on every rank. Collective.

    Args:
        parameter: Sharded by stage 3, or not.
        changes: What the first rank makes of it is sent to the others on leaving.
    """
    if not hasattr(parameter, "ds_id"):
        yield
        return
    zero = load_deepspeed().zero
    with zero.GatheredParameters([parameter], modifier_rank=0 if changes else None):
        yield


def whole_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Every weight under its name in files, whole, on every rank; one at a time. Collective."""
    for name, parameter in model.named_parameters():
        with gathered(parameter):
            yield from file_weights(model, name, parameter.detach())
    for name, buffer in saved_buffers(model):
        yield from file_weights(model, name, buffer)


def load_sharded(
    folder: Path,
    dtype: torch.dtype,
    process: Process,
    settings: dict[str, Any],
    head: Tensor | None = None,
) -> PreTrainedModel | None:
    """The model of a folder, sharded as stage 3 has it; see `load_transformers_model`. Collective.

    The first rank reads, and no rank ever holds more than one module's weights whole. None where
    transformers makes its weights from others in the files.
    """
    is_reward_model = head is not None or read_outline(folder).scalar_head
    model = bare_transformers_model(folder, dtype, process.device, is_reward_model)
    given = {} if head is None else {SCORE: head}
    with HFWeights(folder) as files:
        if not _are_those_of(files, model, given):
            return None

        def read(name: str) -> Tensor:
            return given[name] if name in given else files.read(name, (slice(None),))

        _shard(model, read, settings, process)
    return model


def _are_those_of(files: HFWeights, model: PreTrainedModel, given: Mapping[str, Tensor]) -> bool:
    """Whether the files hold the model's weights under its names, but for those that are given."""
    wanted = {
        file_name: tuple(part.shape)
        for name, tensor in named_tensors(model)
        for file_name, part in file_weights(model, name, tensor.to("meta"))
        if file_name not in given
    }
    held = {name: files.record(name).shape for name in files.names}
    if given or model.config.tie_word_embeddings:
        held.pop(HEAD, None)
    return held == wanted


def _shard(
    model: PreTrainedModel,
    read: Callable[[str], Tensor],
    settings: dict[str, Any],
    process: Process,
) -> None:
    zero = load_deepspeed().zero
    disk = _disk(model, settings, process.layout.world_size)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    made: dict[int, nn.Parameter] = {}
    # From the leaves up: what belongs to a module is sharded before the modules around it.
    for module in reversed(list(model.modules())):
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=process.device)
                if process.is_main:
                    for name, part in file_weights(model, names[id(parameter)], whole):
                        part.copy_(read(name))
                made[id(parameter)] = nn.Parameter(whole)
            module._parameters[key] = made[id(parameter)]
        # Sends the first rank's values to the others.
        zero.Init(
            module=module,
            config_dict_or_path=settings,
            mem_efficient_linear=False,
            param_swapper=disk,
        )
    _fill_buffers(model, read)


def _disk(model: PreTrainedModel, settings: dict[str, Any], ranks: int) -> Any:
    """What keeps all weights of a model on a disk, or None where they stay in memory.

    Each `zero.Init` without it would make its own, which empties the folder of the one before.
    """
    offload = settings["zero_optimization"]["offload_param"]
    if offload["device"] != "nvme":
        return None
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.swap_tensor.partitioned_param_swapper import (
        AsyncPartitionedParameterSwapper,
    )

    largest = max(parameter.numel() for parameter in model.parameters())
    fitting = {"buffer_size": -(-largest // ranks)} | offload
    zero = settings["zero_optimization"] | {"offload_param": fitting}
    config = DeepSpeedConfig(settings | {"zero_optimization": zero})
    return AsyncPartitionedParameterSwapper(config, next(model.parameters()).dtype)


def _fill_buffers(model: PreTrainedModel, read: Callable[[str], Tensor]) -> None:
    """They are small, and whole on every rank."""
    for name, buffer in saved_buffers(model):
        for file_name, part in file_weights(model, name, buffer):
            part.copy_(read(file_name))


def read_weights(model: PreTrainedModel, folder: Path, process: Process) -> None:
    """Fill a model from the files of a folder, read by the first rank. Collective.

    Raises:
        CheckpointError: A file or a weight is missing or broken.
    """
    with HFWeights(folder) as files, torch.no_grad():
        for name, parameter in model.named_parameters():
            with gathered(parameter, changes=True):
                if process.is_main or not hasattr(parameter, "ds_id"):
                    for file_name, part in file_weights(model, name, parameter.detach()):
                        part.copy_(files.read(file_name, (slice(None),)))
        _fill_buffers(model, lambda name: files.read(name, (slice(None),)))
