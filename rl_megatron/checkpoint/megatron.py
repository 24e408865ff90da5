"""Megatron's own checkpoints (torch_dist): readable under any layout and padded vocabulary."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from rl_megatron.checkpoint.naming import unwrap
from rl_megatron.errors import CheckpointError

# The optimizer's state in the shape of its parameters: slower to write than buckets, but it can be
# read under another layout.
_METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}
_COPY_TENSORS = "_set_main_param_and_optimizer_states"


def save_megatron(folder: Path, chunks: Sequence[nn.Module], optimizer: Any = None) -> None:
    """Write weights, and the optimizer's state if there is one, into an empty folder. Collective.

    Megatron writes from spawned processes: the entry script needs `if __name__ == "__main__":`.
    """
    from megatron.core import dist_checkpointing

    dist_checkpointing.save(_state(chunks, optimizer, is_loading=False), str(folder))


def load_megatron(folder: Path, chunks: Sequence[nn.Module], optimizer: Any = None) -> None:
    """Fill weights, and the optimizer's state if given, from what was saved. Collective.

    Raises:
        CheckpointError: A parameter that the checkpoint lacks, or holds in another shape.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from megatron.core.dist_checkpointing.validation import StrictHandling

    template = _state(chunks, optimizer, is_loading=True)
    try:
        with warnings.catch_warnings():
            # Megatron's own business with torch.distributed.checkpoint.
            warnings.simplefilter("ignore", FutureWarning)
            state = dist_checkpointing.load(
                template, str(folder), strict=StrictHandling.RAISE_UNEXPECTED
            )
    except (CheckpointingException, CheckpointException, OSError) as error:
        raise CheckpointError(
            f"The Megatron checkpoint {folder} does not fit the model: {_reason(error)}. "
            "Was it made from the same model, and copied whole?"
        ) from error
    for key, chunk in _named(chunks):
        chunk.load_state_dict(state[key])
    if optimizer is not None:
        _load_optimizer(optimizer, state["optimizer"])


def _reason(error: BaseException) -> str:
    """The error itself, or the first of those that torch gathered from all ranks."""
    if isinstance(error, CheckpointException):
        return str(next(iter(error.failures.values()))[0])
    return str(error)


def _named(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Megatron's keys: `model`, or `model0`, `model1`, ... for the chunks of a virtual pipeline."""
    for index, chunk in enumerate(chunks):
        yield ("model" if len(chunks) == 1 else f"model{index}"), unwrap(chunk)


def _state(chunks: Sequence[nn.Module], optimizer: Any, is_loading: bool) -> dict[str, Any]:
    state: dict[str, Any] = {
        key: chunk.sharded_state_dict(metadata=dict(_METADATA)) for key, chunk in _named(chunks)
    }
    if optimizer is not None:
        _fill_adam_state(optimizer)
        state["optimizer"] = optimizer.sharded_state_dict(
            state, is_loading=is_loading, metadata=dict(_METADATA)
        )
    return state


def _torch_adams(optimizer: Any) -> Iterator[tuple[Any, torch.optim.Optimizer]]:
    """Megatron's optimizers whose Adam is torch's: those of machines without Apex and TE."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if isinstance(part.optimizer, torch.optim.Adam | torch.optim.AdamW):
            yield part, part.optimizer


def _fill_adam_state(optimizer: Any) -> None:
    """Give an Adam that has not stepped yet the zero state that its first step would make.

    Megatron cannot describe torch's Adam without state.
    """
    for _, adam in _torch_adams(optimizer):
        for group in adam.param_groups:
            for parameter in group["params"]:
                if not adam.state[parameter]:
                    adam.state[parameter] = {
                        "step": torch.zeros((), dtype=torch.float32),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }


def _load_optimizer(optimizer: Any, state: Any) -> None:
    """Load Megatron's optimizer state, around two mistakes it makes with torch's Adam.

    Torch keeps the step among the tensors of each parameter. Megatron's distributed optimizer
    looks for it among the tensors in the file, where it is not; and it gives all parameters one
    and the same step tensor, which then grows by one for each parameter instead of each step.
    """
    with contextlib.ExitStack() as undo:
        for part, adam in _torch_adams(optimizer):
            if hasattr(part, _COPY_TENSORS):
                setattr(part, _COPY_TENSORS, _copy_with_step(getattr(part, _COPY_TENSORS), adam))
                undo.callback(delattr, part, _COPY_TENSORS)
        optimizer.load_state_dict(state)
    for _, adam in _torch_adams(optimizer):
        for tensors in adam.state.values():
            tensors["step"] = tensors["step"].clone()


def _copy_with_step(
    copy: Callable[[Any, dict[str, Any]], None], adam: torch.optim.Optimizer
) -> Callable[[Any, dict[str, Any]], None]:
    def copy_with_step(parameter: Any, tensors: dict[str, Any]) -> None:
        step = next(iter(adam.state.values()))["step"]
        copy(parameter, {"step": step, **tensors})

    return copy_with_step
