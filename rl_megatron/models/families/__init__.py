"""The families of models: each file maps a config.json to numbers and names its weights.

To add one: a file with its shape function and its table of weights, a line in `FAMILIES`, and a
tiny model in the conversion tests.
"""

from __future__ import annotations

from pathlib import Path

from rl_megatron.errors import CheckpointError
from rl_megatron.interfaces.weights import WeightRule
from rl_megatron.models.families.common import Family, read_config_json
from rl_megatron.models.families.llama import LLAMA, MISTRAL
from rl_megatron.models.families.mixtral import MIXTRAL
from rl_megatron.models.families.qwen2 import QWEN2
from rl_megatron.models.families.qwen3 import QWEN3
from rl_megatron.models.families.qwen3_moe import QWEN3_MOE
from rl_megatron.models.shape import ModelShape

FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "mixtral": MIXTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
}

__all__ = ["FAMILIES", "Family", "read_shape", "weight_rules"]


def read_shape(hf_folder: Path) -> ModelShape:
    """The numbers of the model whose config.json lies in a folder.

    Raises:
        CheckpointError: No or a broken config.json, a model_type that is not one of `FAMILIES`, or
            a setting that is not implemented. The message names the folder.
    """
    config = read_config_json(hf_folder)
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise CheckpointError(
            f"{hf_folder / 'config.json'}: model_type {model_type!r} is not a known family "
            f"({', '.join(FAMILIES)}). Use a model of one of these, add a family in "
            "rl_megatron/models/families, or set backend=deepspeed, which takes any."
        )
    try:
        return FAMILIES[model_type].shape(config)
    except CheckpointError as error:
        raise CheckpointError(f"{hf_folder}: {error}") from error


def weight_rules(
    shape: ModelShape, make_vocab_size_divisible_by: int = 128
) -> tuple[WeightRule, ...]:
    """Every parameter of a model in Hugging Face and in Megatron names, in a fixed order."""
    return FAMILIES[shape.family].weight_rules(shape, make_vocab_size_divisible_by)
