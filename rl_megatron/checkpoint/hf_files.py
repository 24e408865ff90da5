"""What lies in a Hugging Face model folder: safetensors, and the small files around them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rl_megatron.errors import CheckpointError

SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
)
"""Carried along with the weights, byte by byte, wherever they go."""

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
RECORD_FILE = "conversion.json"
"""Beside the carried files of a Megatron checkpoint: the tensors that the HF folder had."""

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
SCORE = "score.weight"

# Not weights: old files hold the inverse frequencies that follow from the config.
_IGNORED = re.compile(r"^model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq$")

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True)
class TensorRecord:
    """What a file says of one tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; CheckpointError naming the file if it is missing or broken."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing. Copy the folder again.") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}). Copy it again.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, found {type(value).__name__}.")
    return value


class HFWeights:
    """The weights of one folder, read slice by slice. Use as a context manager."""

    def __init__(self, folder: Path) -> None:
        """Reads the headers of all files; raises CheckpointError if something is missing."""
        self.folder = folder
        self._files: dict[str, Any] = {}
        self._file_of = _locate(folder)
        for file in sorted(set(self._file_of.values())):
            self._files[file] = _open(folder / file)
        held = {file: set(handle.keys()) for file, handle in self._files.items()}
        for name, file in self._file_of.items():
            if name not in held[file]:
                raise CheckpointError(
                    f"{folder}: {INDEX_FILE} places {name} in {file}, which does not hold it. "
                    "Copy the folder again."
                )

    def __enter__(self) -> HFWeights:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for handle in self._files.values():
            handle.__exit__(kind, error, trace)

    @property
    def names(self) -> frozenset[str]:
        """Names of all weights; inverse frequencies in old files are none."""
        return frozenset(name for name in self._file_of if not _IGNORED.match(name))

    def record(self, name: str) -> TensorRecord:
        """Dtype and shape of a tensor, from the header."""
        view = self._files[self._file_of[name]].get_slice(name)
        dtype = _DTYPES.get(view.get_dtype())
        if dtype is None:
            raise CheckpointError(
                f"{self.folder}: {name} has dtype {view.get_dtype()}; only {', '.join(_DTYPES)} "
                "can be trained. Use the unquantised model."
            )
        return TensorRecord(dtype, tuple(view.get_shape()))

    def read(self, name: str, slices: tuple[slice, ...]) -> Tensor:
        """A part of a tensor, on the host, in the dtype of the file."""
        part: Tensor = self._files[self._file_of[name]].get_slice(name)[slices]
        return part


def _locate(folder: Path) -> dict[str, str]:
    """File name of every tensor."""
    if (folder / INDEX_FILE).exists():
        weight_map = read_json(folder / INDEX_FILE).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{folder / INDEX_FILE} has no weight_map. Copy it again.")
        missing = sorted({f for f in weight_map.values() if not (folder / f).exists()})
        if missing:
            raise CheckpointError(
                f"{folder} lacks {', '.join(missing)}, named in {INDEX_FILE}. Copy the files again."
            )
        return weight_map
    if not (folder / SINGLE_FILE).exists():
        raise CheckpointError(
            f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}. Only safetensors are read "
            "(nothing is unpickled): save the model with save_pretrained, or copy the files again."
        )
    handle = _open(folder / SINGLE_FILE)
    with handle:
        return dict.fromkeys(handle.keys(), SINGLE_FILE)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except SafetensorError as error:
        raise CheckpointError(
            f"{path} is not a complete safetensors file ({error}). Copy it again."
        ) from error


def file_name(number: int, count: int) -> str:
    """Of file `number`, from 0, of so many."""
    return SINGLE_FILE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def write_index(folder: Path, weight_map: Mapping[str, str], total_bytes: int) -> None:
    """Say which of several files holds which weight."""
    index = {
        "metadata": {"total_size": total_bytes},
        "weight_map": dict(sorted(weight_map.items())),
    }
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def read_records(folder: Path) -> dict[str, TensorRecord]:
    """The tensors of a HF folder, or of the HF folder that a Megatron checkpoint came from."""
    if not (folder / RECORD_FILE).exists():
        with HFWeights(folder) as weights:
            return {name: weights.record(name) for name in sorted(weights.names)}
    tensors = read_json(folder / RECORD_FILE)["tensors"]
    return {
        name: TensorRecord(_DTYPES[entry["dtype"]], tuple(entry["shape"]))
        for name, entry in tensors.items()
    }


def lossless_dtype(records: Iterable[TensorRecord]) -> torch.dtype:
    """The model dtype, bfloat16 or float32, that holds every tensor without rounding."""
    narrow = all(record.dtype == torch.bfloat16 for record in records)
    return torch.bfloat16 if narrow else torch.float32


def carry_hf_files(source: Path, target: Path) -> None:
    """Put into `target` all that an export needs besides weights: `source` may then move away.

    Args:
        source: A HF folder, or the `hf` folder of a Megatron checkpoint.
        target: The `hf` folder of a Megatron checkpoint; made if it does not exist.
    """
    target.mkdir(parents=True, exist_ok=True)
    copy_side_files(source, target)
    names = {dtype: name for name, dtype in _DTYPES.items()}
    tensors = {
        name: {"dtype": names[record.dtype], "shape": list(record.shape)}
        for name, record in read_records(source).items()
    }
    text = json.dumps({"format": 1, "tensors": tensors}, indent=1)
    (target / RECORD_FILE).write_text(text + "\n", encoding="utf-8")


def copy_side_files(source: Path, target: Path) -> None:
    """Copy those of `SIDE_FILES` that exist."""
    for name in SIDE_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)
