"""Which weights are trained, and which they are compared with."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from rl_megatron.config.base import Strict


class ModelConfig(Strict):
    """The policy."""

    path: str
    """Hugging Face folder, or a checkpoint made by `tools/convert_checkpoint.py import`."""

    tokenizer_path: str | None = None
    """Folder with a Hugging Face tokenizer or a `tokenizer.model`, or a `.model` file.
    null: `model.path`."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and activations. Log-probs and losses are float32 in either case."""

    make_vocab_size_divisible_by: PositiveInt = 128
    """The vocabulary is padded to a multiple of this times the tensor-parallel size."""

    recompute: Literal["none", "full"] = "none"
    """full: keep only the input of each layer and compute the rest again in the backward pass."""

    moe_aux_loss_coeff: float = Field(default=0.0, ge=0)
    """Coefficient of the balance loss of a model with experts: of each sequence by itself
    (DeepSeek-V3, eq. 17-20), mean over the sequences, sum over the layers. 0: none. Backend
    megatron."""

    chat_template: str | None = None
    """Path of a jinja file that replaces the tokenizer's own chat template."""


class ReferenceConfig(Strict):
    """The frozen model of DPO, and of GRPO when a KL term is used."""

    path: str | None = None
    """As `model.path`. null: `model.path`, so the reference is the policy before training."""

    placement: Literal["resident", "swapped"] = "resident"
    """resident: an instance of its own. swapped: its weights wait in host memory, and come to the
    device while they are needed (Megatron: in the policy's place): less memory, more time."""
