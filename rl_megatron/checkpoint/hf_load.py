"""Hugging Face weights into a Megatron model: each rank reads only the slices it holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from rl_megatron.checkpoint.hf_files import EMBEDDING, HEAD, SCORE, HFWeights
from rl_megatron.checkpoint.naming import Placement, place
from rl_megatron.errors import CheckpointError
from rl_megatron.interfaces.weights import Read, WeightRule
from rl_megatron.parallel import watchdog
from rl_megatron.parallel.process import Process

Track = Callable[[Sequence[Placement]], Iterable[Placement]]


def load_hf_weights(
    chunks: Iterable[nn.Module],
    rules: Sequence[WeightRule],
    folder: Path,
    process: Process,
    track: Track = iter,
    head: Tensor | None = None,
) -> None:
    """Fill every parameter of the model from a HF folder, cast to the parameter's dtype.

    Collective. Every parameter is filled exactly once, every tensor of the folder is used.

    Args:
        chunks: This rank's model chunks.
        rules: All weights of the model (`models.families.weight_rules`).
        folder: Folder with safetensors.
        process: This rank.
        track: Wraps the loop over weights, e.g. in a progress bar.
        head: A scalar head [1, H] in place of the folder's own head over the vocabulary.

    Raises:
        CheckpointError: A missing, unexpected or wrongly shaped tensor, or a broken file.
    """
    placements = place(chunks, rules, process)
    with HFWeights(folder) as weights:
        read = [rule for rule in rules if head is None or rule.hf_names != (SCORE,)]
        _check_names(weights, read, replaces_head=head is not None)
        _check_shapes(weights, read)
        for placement in track(placements):
            watchdog.beat()
            if head is not None and placement.rule.hf_names == (SCORE,):
                _copy(placement, head)
            else:
                _fill(placement, weights, process)


def _fill(placement: Placement, weights: HFWeights, process: Process) -> None:
    parameter, rule = placement.parameter, placement.rule
    if parameter is None:
        return
    shard = rule.split.shard(_reader(weights, rule), process.tensor_rank, process.layout.tensor)
    if shard.shape != parameter.shape:
        raise CheckpointError(
            f"{weights.folder}: {', '.join(rule.hf_names)} gives {list(shard.shape)} for "
            f"{rule.megatron_name}, the model has {list(parameter.shape)}. "
            "Was the model built with the same make_vocab_size_divisible_by?"
        )
    _copy(placement, shard)


@torch.no_grad()
def _copy(placement: Placement, value: Tensor) -> None:
    if placement.parameter is not None:
        placement.parameter.copy_(value)


def _reader(weights: HFWeights, rule: WeightRule) -> Read:
    return lambda index, slices: weights.read(rule.hf_names[index], slices)


def _check_names(weights: HFWeights, rules: Sequence[WeightRule], replaces_head: bool) -> None:
    expected = {name for rule in rules for name in rule.hf_names}
    missing = sorted(expected - weights.names)
    if missing:
        remedy = "Copy the folder again."
        if missing == [HEAD]:
            remedy = "config.json says tie_word_embeddings false; is that so for this model?"
        raise CheckpointError(f"{weights.folder} lacks {_some(missing)}. {remedy}")
    extra = set(weights.names - expected)
    if replaces_head:
        extra.discard(HEAD)
    if HEAD in extra:
        # The model is tied, and some files hold the head all the same.
        _check_tied_head(weights)
        extra.remove(HEAD)
    if extra:
        raise CheckpointError(
            f"{weights.folder} holds {_some(sorted(extra))}, which config.json gives no place to; "
            "the model would not be the one in the folder. Check model_type and its settings."
        )


def _check_tied_head(weights: HFWeights) -> None:
    whole = (slice(None),)
    if not torch.equal(weights.read(HEAD, whole), weights.read(EMBEDDING, whole)):
        raise CheckpointError(
            f"{weights.folder}: config.json says tie_word_embeddings true, but {HEAD} differs from "
            f"{EMBEDDING}. Set tie_word_embeddings to false, or remove the tensor."
        )


def _check_shapes(weights: HFWeights, rules: Sequence[WeightRule]) -> None:
    for rule in rules:
        for name, expected in zip(rule.hf_names, rule.split.hf_shapes, strict=True):
            found = weights.record(name).shape
            if found != expected:
                raise CheckpointError(
                    f"{weights.folder}: {name} has shape {list(found)}, config.json asks for "
                    f"{list(expected)}. The two do not belong together; copy both again."
                )


def _some(names: Sequence[str], limit: int = 5) -> str:
    """The first few names, and how many more."""
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest
