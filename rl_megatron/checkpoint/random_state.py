"""The random generators of a rank. No number of a recipe comes from them (data order and sampling
count instead of drawing), but a user's reward or an architecture with dropout may ask them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rl_megatron.errors import CheckpointError
from rl_megatron.parallel.process import Process

FOLDER = "random_state"

_MEGATRON = "megatron."


def seed_random_state(seed: int, process: Process) -> None:
    """Begin the generators: torch's the same on all ranks, those of Python and NumPy another stream
    on each; Megatron's begin with the job."""
    torch.manual_seed(seed)
    random.seed(f"{seed} {process.rank}")
    np.random.seed([seed % 2**32, process.rank])


def save_random_state(folder: Path, process: Process) -> None:
    """Write this rank's generators into the folder of a checkpoint."""
    (folder / FOLDER).mkdir(exist_ok=True)
    save_file(_state(process), _file(folder, process))


def load_random_state(folder: Path, process: Process) -> None:
    """Undo `save_random_state`, in a job of the same layout.

    Raises:
        CheckpointError: The file of this rank is missing or broken.
    """
    path = _file(folder, process)
    try:
        state = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path}: the random state of rank {process.rank} cannot be read ({error}). Copy the "
            "checkpoint again, or name another one."
        ) from error
    version, *internal = state["python"].tolist()
    random.setstate((version, tuple(internal), None))
    position, has_gauss = state["numpy.place"].tolist()
    gauss = float(state["numpy.gauss"])
    keys = state["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, position, has_gauss, gauss))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and process.device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], process.device)
    _load_megatron(state)


def _file(folder: Path, process: Process) -> Path:
    return folder / FOLDER / f"rank_{process.rank:05d}.safetensors"


def _state(process: Process) -> dict[str, Tensor]:
    version, internal, _ = random.getstate()
    _, keys, position, has_gauss, gauss = np.random.get_state()
    state = {
        "python": torch.tensor([version, *internal], dtype=torch.int64),
        "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64)),
        "numpy.place": torch.tensor([position, has_gauss]),
        "numpy.gauss": torch.tensor(gauss, dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if process.device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(process.device)
    if process.tensor_group is not None:
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        tracked = get_cuda_rng_tracker().get_states()
        state |= {f"{_MEGATRON}{name}": value.cpu() for name, value in tracked.items()}
    return {name: value.clone().contiguous() for name, value in state.items()}


def _load_megatron(state: Mapping[str, Tensor]) -> None:
    tracked = {
        name.removeprefix(_MEGATRON): value
        for name, value in state.items()
        if name.startswith(_MEGATRON)
    }
    if tracked:
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        get_cuda_rng_tracker().set_states(tracked)
