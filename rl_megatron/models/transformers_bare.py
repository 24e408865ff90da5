"""A transformers model whose weights come and go, and their memory with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from rl_megatron.models.transformers_model import as_we_run_it, model_kind


def bare_transformers_model(
    folder: Path, dtype: torch.dtype, device: torch.device, is_reward_model: bool = False
) -> PreTrainedModel:
    """The model that the config.json of a folder describes; no weight is read.

    It has no memory for its weights before `take_memory`, and no weights before they are set.
    Buffers, such as the frequencies of rotary positions, are there.
    """
    kind, more = model_kind(is_reward_model)
    config = AutoConfig.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False, **more
    )
    return _bare(lambda: kind.from_config(config, dtype=dtype), device)


def bare_copy(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Another model of the same kind; see `bare_transformers_model`."""
    return _bare(lambda: type(model)._from_config(model.config, dtype=model.dtype), device)


def _bare(make: Callable[[], PreTrainedModel], device: torch.device) -> PreTrainedModel:
    with _parameters_on_meta():
        model = as_we_run_it(make())
    empty: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                # A tied weight stays one.
                if parameter not in empty:
                    empty[parameter] = _without_memory(parameter, device)
                module._parameters[name] = empty[parameter]
    return model.to(device).eval()


def take_memory(model: PreTrainedModel) -> None:
    """Memory for weights that are not there yet; nothing happens to those that are."""
    for parameter in model.parameters():
        parameter.untyped_storage().resize_(parameter.numel() * parameter.itemsize)


def give_memory_back(model: PreTrainedModel) -> None:
    """Forget the weights."""
    for parameter in model.parameters():
        parameter.untyped_storage().resize_(0)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Inside, a parameter loses its memory as soon as a module has it; buffers stay what they are.

    torch.device("meta") would take the values of buffers too.
    """
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"))
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _without_memory(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    empty = torch.empty_like(parameter, device=device, requires_grad=False)
    empty.untyped_storage().resize_(0)
    return nn.Parameter(empty, requires_grad=False)
