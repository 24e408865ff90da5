"""Megatron's own checkpoints (torch_dist): readable under any layout and padded vocabulary."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rl_megatron.checkpoint.naming import unwrap
from rl_megatron.errors import CheckpointError

# The optimizer's state in the shape of its parameters: slower to write than buckets, but it can be
# read under another layout.
_METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}


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
    except (CheckpointingException, OSError) as error:
        raise CheckpointError(
            f"The Megatron checkpoint {folder} does not fit the model: {error}. "
            "Was it made from the same model, and copied whole?"
        ) from error
    for key, chunk in _named(chunks):
        chunk.load_state_dict(state[key])
    if optimizer is not None:
        optimizer.load_state_dict(state["optimizer"])


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


def _fill_adam_state(optimizer: Any) -> None:
    """Give a torch Adam that has not stepped yet the zero state that its first step would make.

    Without Transformer Engine or Apex, Megatron cannot describe an Adam that has no state.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        adam = part.optimizer
        if not isinstance(adam, torch.optim.Adam | torch.optim.AdamW):
            continue
        for group in adam.param_groups:
            for parameter in group["params"]:
                if not adam.state[parameter]:
                    adam.state[parameter] = {
                        "step": torch.zeros((), dtype=torch.float32),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }
