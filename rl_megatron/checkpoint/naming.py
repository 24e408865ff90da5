"""From the parameters that a rank holds to the weights of the whole model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl_megatron.errors import CheckpointError
from rl_megatron.interfaces.weights import WeightRule
from rl_megatron.parallel.process import Process

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")

# Transformer Engine keeps the norm before a linear layer inside that layer.
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


@dataclass(frozen=True)
class Placement:
    """Which stage holds a weight, and what this rank holds of it.

    Attributes:
        rule: The weight.
        stage: First pipeline stage that holds it.
        dtype: Its dtype there.
        parameter: This rank's shard; None on other stages.
    """

    rule: WeightRule
    stage: int
    dtype: torch.dtype
    parameter: Tensor | None


def unwrap(chunk: nn.Module) -> nn.Module:
    """The GPT model inside Megatron's wrappers (DDP, Float16Module)."""
    while not hasattr(chunk, "decoder"):
        chunk = chunk.module  # type: ignore[assignment]
    return chunk


def global_parameters(chunks: Iterable[nn.Module]) -> dict[str, Tensor]:
    """This rank's parameters by the name they have in the whole model.

    Layers are numbered over the whole model: each layer knows its own number, so uneven stages
    and virtual stages need no arithmetic here.
    """
    found: dict[str, Tensor] = {}
    for chunk in chunks:
        model = unwrap(chunk)
        for local_name, parameter in model.named_parameters():
            name = _global_name(model, local_name)
            assert name not in found, f"{name} is held twice by one rank"
            found[name] = parameter
    return found


def _global_name(model: nn.Module, local_name: str) -> str:
    match = _LAYER.match(local_name)
    if match is None:
        return local_name
    index, rest = int(match[1]), match[2]
    layer_number = model.decoder.layers[index].layer_number  # type: ignore[union-attr,index]
    return f"decoder.layers.{layer_number - 1}.{_FUSED_NORMS.get(rest, rest)}"


def place(
    chunks: Iterable[nn.Module], rules: Sequence[WeightRule], process: Process
) -> list[Placement]:
    """Where every weight is. Collective over the pipeline.

    Raises:
        CheckpointError: A parameter that no rule knows, or a rule without a parameter.
    """
    own = global_parameters(chunks)
    mine = {name: parameter.dtype for name, parameter in own.items()}
    by_stage = [mine]
    if process.layout.pipeline > 1:
        by_stage = [{} for _ in range(process.layout.pipeline)]
        dist.all_gather_object(by_stage, mine, group=process.pipeline_group)
    known = {rule.megatron_name for rule in rules}
    unknown = sorted({name for stage in by_stage for name in stage} - known)
    placements = []
    missing = []
    for rule in rules:
        stages = [i for i, names in enumerate(by_stage) if rule.megatron_name in names]
        if stages:
            dtype = by_stage[stages[0]][rule.megatron_name]
            placements.append(Placement(rule, stages[0], dtype, own.get(rule.megatron_name)))
        elif not rule.is_copy:
            missing.append(rule.megatron_name)
    if unknown or missing:
        raise CheckpointError(
            "The Megatron model does not fit its family's table of weights: parameters without a "
            f"rule {unknown}, rules without a parameter {missing}. Correct the table in "
            "rl_megatron/models/families, or the model that was built."
        )
    return placements
