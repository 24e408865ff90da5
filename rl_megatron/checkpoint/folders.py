"""What a path given as a model is: a Hugging Face folder, or a Megatron checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rl_megatron.checkpoint.hf_files import INDEX_FILE, SINGLE_FILE
from rl_megatron.checkpoint.publish import POINTER_FILE, iteration_folder, read_pointer
from rl_megatron.errors import CheckpointError

HF_SUBFOLDER = "hf"
"""Folder inside a Megatron checkpoint with the files around the weights."""

_MEGATRON_FILE = "metadata.json"


@dataclass(frozen=True)
class ModelFolder:
    """A model on disk.

    Attributes:
        hf: Folder with config.json and the tokenizer's files.
        megatron: Folder of the torch_dist checkpoint that holds the weights; None where they are
            safetensors in `hf`.
    """

    hf: Path
    megatron: Path | None = None


def resolve_model_folder(path: Path, setting: str = "model.path") -> ModelFolder:
    """What `path` is: a HF folder, a root of checkpoints (the latest is taken), or one of them.

    Args:
        path: Folder given by the user.
        setting: What it was given as, for messages.

    Raises:
        CheckpointError: The path is missing, half-written or neither of these; what is missing is
            named.
    """
    if not path.is_dir():
        kind = "is a file" if path.exists() else "does not exist"
        raise CheckpointError(f"{setting} {path} {kind}; name the model's folder.")
    if path.name.endswith(".tmp"):
        raise CheckpointError(
            f"{setting} {path} was being written when its job ended, and may be incomplete. "
            "Name a folder without .tmp."
        )
    if (path / POINTER_FILE).exists():
        iteration = read_pointer(path)
        assert iteration is not None
        path = iteration_folder(path, iteration)
    # What backend torch writes is a Hugging Face folder too, with Adam's state beside the weights.
    is_cut_short = path.name.startswith("iter_") and not (path / "config.json").exists()
    if (path / _MEGATRON_FILE).exists() or is_cut_short:
        return _megatron(path, setting)
    return _hf(path, setting)


def _hf(path: Path, setting: str) -> ModelFolder:
    if not (path / "config.json").exists():
        raise CheckpointError(
            f"{setting} {path} is no model folder: it has no config.json (Hugging Face) and no "
            f"{POINTER_FILE} (Megatron). Name one, or convert a model with "
            "tools/convert_checkpoint.py."
        )
    if not any((path / name).exists() for name in (SINGLE_FILE, INDEX_FILE)):
        raise CheckpointError(
            f"{setting} {path} has config.json but no weights: neither {SINGLE_FILE} nor "
            f"{INDEX_FILE}. Only safetensors are read; copy them there."
        )
    return ModelFolder(hf=path)


def _megatron(path: Path, setting: str) -> ModelFolder:
    needed = (_MEGATRON_FILE, ".metadata", f"{HF_SUBFOLDER}/config.json")
    missing = [name for name in needed if not (path / name).exists()]
    if missing:
        raise CheckpointError(
            f"{setting}: the Megatron checkpoint {path} lacks {', '.join(missing)}. It is "
            "incomplete, or not one of ours; copy it again or name another."
        )
    return ModelFolder(hf=path / HF_SUBFOLDER, megatron=path)
