"""From the parameters that a rank holds to the weights of the whole model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from rl_megatron.errors import CheckpointError
from rl_megatron.interfaces.weights import WeightRule
from rl_megatron.parallel.process import Process

T = TypeVar("T")

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.+)$")

_EXPERT = re.compile(r"^mlp\.experts\.local_experts\.(\d+)\.(.+)$")

# Transformer Engine keeps the experts of a rank in one module, with a weight for each of them.
_GROUPED = re.compile(r"^mlp\.experts\.(linear_fc[12])\.weight(\d+)$")

# Transformer Engine keeps the norm before a linear layer inside that layer.
_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


@dataclass(frozen=True)
class Placement:
    """Which ranks hold a weight, and what this rank holds of it.

    Attributes:
        rule: The weight.
        stage: First pipeline stage that holds it.
        expert_rank: The only expert-parallel rank there that holds it; None if all do.
        dtype: Its dtype there.
        parameter: This rank's shard; None on other stages and expert-parallel ranks.
    """

    rule: WeightRule
    stage: int
    expert_rank: int | None
    dtype: torch.dtype
    parameter: Tensor | None


def unwrap(chunk: nn.Module) -> nn.Module:
    """The GPT model inside Megatron's wrappers (DDP, Float16Module)."""
    while not hasattr(chunk, "decoder"):
        chunk = chunk.module  # type: ignore[assignment]
    return chunk


def global_parameters(chunks: Iterable[nn.Module]) -> dict[str, Tensor]:
    """This rank's parameters by the name they have in the whole model.

    Layers and experts are numbered over the whole model. Each layer knows its own number and those
    of its experts, so uneven stages and virtual stages need no arithmetic here.
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
    layer = model.decoder.layers[index]  # type: ignore[union-attr,index]
    rest = _GROUPED.sub(r"mlp.experts.local_experts.\2.\1.weight", rest)
    if expert := _EXPERT.match(rest):
        number = layer.mlp.local_expert_indices[int(expert[1])]
        rest = f"mlp.experts.local_experts.{number}.{expert[2]}"
    return f"decoder.layers.{layer.layer_number - 1}.{_FUSED_NORMS.get(rest, rest)}"


def place(
    chunks: Iterable[nn.Module], rules: Sequence[WeightRule], process: Process
) -> list[Placement]:
    """Where every weight is. Collective over the pipeline and the ranks that share experts.

    Raises:
        CheckpointError: A parameter that no rule knows, or a rule without a parameter.
    """
    own = global_parameters(chunks)
    mine = {name: parameter.dtype for name, parameter in own.items()}
    by_expert_rank = _gather(mine, process.layout.expert, process.expert_group)
    by_stage = _gather(by_expert_rank, process.layout.pipeline, process.pipeline_group)
    known = {rule.megatron_name for rule in rules}
    unknown = sorted({name for ranks in by_stage for held in ranks for name in held} - known)
    placements = []
    missing = []
    for rule in rules:
        name = rule.megatron_name
        stages = [i for i, ranks in enumerate(by_stage) if any(name in held for held in ranks)]
        if stages:
            ranks = by_stage[stages[0]]
            holders = [rank for rank, held in enumerate(ranks) if name in held]
            alone = holders[0] if len(holders) < len(ranks) else None
            dtype = ranks[holders[0]][name]
            placements.append(Placement(rule, stages[0], alone, dtype, own.get(name)))
        elif not rule.is_copy:
            missing.append(name)
    if unknown or missing:
        raise CheckpointError(
            "The Megatron model does not fit its family's table of weights: parameters without a "
            f"rule {unknown}, rules without a parameter {missing}. Correct the table in "
            "rl_megatron/models/families, or the model that was built."
        )
    return placements


def _gather(value: T, size: int, group: ProcessGroup | None) -> list[T]:
    """What each rank of a group gives, on all of them."""
    if size == 1:
        return [value]
    values: list[T] = [value] * size
    dist.all_gather_object(values, value, group=group)
    return values
