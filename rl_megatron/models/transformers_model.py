"""A transformers model on one device, as the torch backend and the hf engine hold it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)
from transformers.utils import logging

from rl_megatron.errors import CheckpointError
from rl_megatron.models.families import FAMILIES, read_shape
from rl_megatron.models.fresh_head import HEAD, SCORE


def load_transformers_model(
    folder: Path, dtype: torch.dtype, device: torch.device, head: Tensor | None = None
) -> PreTrainedModel:
    """The model of a Hugging Face folder, all of its weights read from there.

    Args:
        folder: A language model's, or a reward model's.
        dtype: Of its weights.
        device: Where it is put.
        head: A scalar head [1, H] in place of the folder's own head over the vocabulary.

    Raises:
        CheckpointError: The family is unknown, or the weights are missing, incomplete or not those
            that config.json describes (transformers would fill in random ones).
    """
    is_reward_model = read_shape(folder).scalar_head or head is not None
    kind, more = model_kind(is_reward_model)
    logging.disable_progress_bar()  # It would fill the logs of jobs without a terminal.
    try:
        model, info = kind.from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            **more,
        )
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise CheckpointError(
            f"{folder} cannot be loaded as a model: {error}. Copy the folder again."
        ) from error
    replaced = {SCORE, HEAD} if head is not None else set()
    if missing := sorted(info["missing_keys"] - replaced):
        raise CheckpointError(
            f"{folder} lacks {', '.join(missing)}, which config.json asks for. Copy it again."
        )
    if unexpected := sorted(info["unexpected_keys"] - replaced):
        raise CheckpointError(
            f"{folder} holds {', '.join(unexpected)}, which config.json gives no place to; the "
            "model would not be the one in the folder. Check model_type and its settings."
        )
    model = as_we_run_it(model)
    if head is not None:
        with torch.no_grad():
            model.score.weight.copy_(head)
    return model.to(device)


def model_kind(is_reward_model: bool) -> tuple[Any, dict[str, Any]]:
    """transformers' class, and what its config is to say."""
    if is_reward_model:
        return AutoModelForSequenceClassification, {"num_labels": 1}
    return AutoModelForCausalLM, {}


def as_we_run_it(model: PreTrainedModel) -> PreTrainedModel:
    """The same model, without what transformers does otherwise."""
    # transformers never trains the embedding of the padding token. Here it is a token like others:
    # nothing is padded with it that counts, and a model may sample it.
    model.get_input_embeddings().padding_idx = None
    # Experts one after the other: the faster ways are not made for every dtype and device.
    model.set_experts_implementation("eager")
    return model


def named_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Every weight under its name in files; a head that is tied to the embedding is not one."""
    for name, parameter in model.named_parameters():
        yield from file_weights(model, name, parameter.detach())


def file_weights(model: PreTrainedModel, name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The weights that a parameter of the model is made of, under their names in files.

    transformers keeps the experts of a layer in one tensor, and their names in files to the files:
    what is given here are views of each of them.

    Args:
        model: Its parameters may be empty, as those are that ZeRO-3 shares.
        name: Of the parameter in the model.
        value: The whole parameter.
    """
    names = FAMILIES[model.config.model_type].experts
    layer, inside, rest = name.partition(".mlp.")
    if names is None or not inside:
        yield name, value
        return
    prefix = f"{layer}.{names.block}."
    if rest == "experts.gate_up_proj":
        for e, both in enumerate(value):
            gate, up = both.chunk(2)
            yield f"{prefix}experts.{e}.{names.gate}.weight", gate
            yield f"{prefix}experts.{e}.{names.up}.weight", up
    elif rest == "experts.down_proj":
        for e, down in enumerate(value):
            yield f"{prefix}experts.{e}.{names.down}.weight", down
    else:
        yield prefix + rest, value


@torch.no_grad()
def set_weights(model: PreTrainedModel, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copy weights into the model, cast to its dtype; they must be exactly its own.

    Raises:
        CheckpointError: A weight is missing, unknown or of another shape.
    """
    parameters = dict(named_weights(model))
    for name, value in weights:
        target = parameters.pop(name, None)
        if target is None or target.shape != value.shape:
            expected = "no such weight" if target is None else str(list(target.shape))
            raise CheckpointError(
                f"{name} has shape {list(value.shape)}, the model has {expected}: the weights are "
                "those of another model. Check model.path."
            )
        target.copy_(value)
    if parameters:
        raise CheckpointError(
            f"weights are missing: {', '.join(parameters)}. They are those of another model; check "
            "model.path."
        )
