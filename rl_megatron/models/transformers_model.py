"""A transformers model on one device, as the torch backend and the hf engine hold it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import logging

from rl_megatron.errors import CheckpointError
from rl_megatron.models.fresh_head import SCORE
from rl_megatron.models.outline import read_outline


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
        CheckpointError: transformers does not know the architecture, or the weights are missing,
            incomplete or not those that config.json describes (random ones would be filled in).
    """
    is_reward_model = read_outline(folder).scalar_head or head is not None
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
            ignore_mismatched_sizes=True,  # Which are named below.
            **more,
        )
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise CheckpointError(
            f"{folder} cannot be loaded as a model: {error}. Copy the folder again."
        ) from error
    missing, unexpected = info["missing_keys"], info["unexpected_keys"]
    if head is not None:
        # What lies outside the base model is the head over the vocabulary.
        inside = model.base_model_prefix + "."
        missing = missing - {SCORE}
        unexpected = {name for name in unexpected if name.startswith(inside)}
    if missing := sorted(missing):
        raise CheckpointError(
            f"{folder} lacks {', '.join(missing)}, which config.json asks for. Copy it again."
        )
    for name, held, wanted in sorted(info["mismatched_keys"]):
        raise CheckpointError(
            f"{folder} holds {name} of shape {list(held)}, and config.json asks for "
            f"{list(wanted)}. Copy it again."
        )
    if unexpected := sorted(unexpected):
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
    """The same model, without what transformers does otherwise.

    Raises:
        CheckpointError: Its weights in files are not pieces of its parameters.
    """
    # transformers never trains the embedding of the padding token. Here it is a token like others:
    # nothing is padded with it that counts, and a model may sample it.
    model.get_input_embeddings().padding_idx = None
    # Experts one after the other: the faster ways are not made for every dtype and device.
    model.set_experts_implementation("eager")
    # Names in files are those of the architecture, whatever the files were that it came from.
    model._weight_conversions = None
    _check_pieces(model)
    return model


def named_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Every weight under its name in files; a head that is tied to the embedding is not one."""
    for name, tensor in named_tensors(model):
        yield from file_weights(model, name, tensor)


def named_tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Everything that a checkpoint holds, under its name in the model: parameters, then buffers."""
    yield from ((name, parameter.detach()) for name, parameter in model.named_parameters())
    yield from saved_buffers(model)


def saved_buffers(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """The buffers that are weights, such as the bias that balances experts; most are none."""
    saved = model.state_dict(keep_vars=True).keys()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in saved)


def file_weights(model: PreTrainedModel, name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The weights that a parameter of the model is made of, under their names in files.

    transformers keeps the experts of a layer in one tensor, and their names in files to the files:
    what is given here are views of each of them.

    Args:
        model: Its parameters may be empty, as those are that ZeRO-3 shares.
        name: Of the parameter in the model.
        value: The whole parameter.
    """
    with _Views():
        pieces = revert_weight_conversion(model, {name: value})
    yield from pieces.items()


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


class _Views(TorchFunctionMode):
    """Inside, `contiguous` leaves a tensor as it is: pieces stay views of what they are of."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return args[0] if func is Tensor.contiguous else func(*args, **(kwargs or {}))


def _check_pieces(model: PreTrainedModel) -> None:
    """Refuse a model whose weights in files are not views of one parameter each."""
    seen = set()
    for name, tensor in named_tensors(model):
        empty = torch.empty_like(tensor, device="meta")
        pieces = dict(file_weights(model, name, empty))
        whole = sum(piece.numel() for piece in pieces.values()) == empty.numel()
        views = all(piece is empty or piece._base is empty for piece in pieces.values())
        if not (whole and views) or seen & pieces.keys():
            raise CheckpointError(
                f"model_type {model.config.model_type}: transformers computes "
                f"{', '.join(list(pieces)[:3])} in files from {name} and more. Only "
                "architectures whose weights in files are pieces of its own can be trained."
            )
        seen |= pieces.keys()
