"""Whether a model and a number of ranks fit a layout."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rl_megatron.config.base import Problem
from rl_megatron.config.parallel import ClusterConfig, ParallelConfig
from rl_megatron.errors import ConfigError


def world_size_problems(parallel: ParallelConfig, world_size: int) -> Iterator[Problem]:
    """The layout, where it does not divide the ranks; keys are those of a run."""
    if world_size % parallel.model_parallel_size:
        tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
        cp = parallel.context_parallel_size
        key = "context_parallel_size"
        if world_size % tp:
            key = "tensor_model_parallel_size"
        elif world_size % (tp * pp):
            key = "pipeline_model_parallel_size"
        yield Problem(
            f"parallel.{key}",
            getattr(parallel, key),
            f"tensor ({tp}) x pipeline ({pp}) x context ({cp}) must divide "
            f"world size ({world_size}); change the degrees or the number of ranks",
            others=("parallel", "cluster"),
        )
        return
    expert, context = parallel.expert_model_parallel_size, parallel.context_parallel_size
    data = parallel.data_parallel_size(world_size)
    if data * context % expert:
        yield Problem(
            "parallel.expert_model_parallel_size",
            expert,
            f"must divide data ({data}) x context ({context}), the ranks that can share experts; "
            "change it, another degree or the number of ranks",
            others=("parallel", "cluster"),
        )


def check_world_size(
    parallel: ParallelConfig, world_size: int, cluster: ClusterConfig | None = None
) -> int:
    """The data-parallel size of `world_size` ranks.

    Raises:
        ConfigError: The layout does not divide the ranks, or other ranks were launched than
            `cluster` asks for.
    """
    wanted = None if cluster is None else cluster.world_size
    if wanted is not None and cluster is not None and wanted != world_size:
        raise ConfigError(
            f"cluster.num_nodes ({cluster.num_nodes}) x cluster.gpus_per_node "
            f"({cluster.gpus_per_node}) asks for {wanted} ranks and {world_size} were launched; "
            "launch as many, or change cluster"
        )
    for problem in world_size_problems(parallel, world_size):
        raise ConfigError(f"{problem.key} = {problem.value}: {problem.text}")
    return parallel.data_parallel_size(world_size)


def check_model_fits(
    parallel: ParallelConfig,
    *,
    num_layers: int,
    num_attention_heads: int,
    num_key_value_heads: int,
    intermediate_size: int,
    num_experts: int | None = None,
) -> None:
    """Refuse a layout that cannot hold a model of this shape.

    The vocabulary always fits: it is padded (`model.make_vocab_size_divisible_by`).

    Args:
        parallel: The layout.
        num_layers, num_attention_heads, num_key_value_heads: Of the model.
        intermediate_size: Of a layer's gate projection; of one expert's, where layers have experts.
        num_experts: Of a layer; None in a dense model.

    Raises:
        ConfigError: Every part of the model that does not divide, with what would.
    """
    shared = {
        "num_attention_heads": num_attention_heads,
        "num_key_value_heads": num_key_value_heads,
        "intermediate_size": intermediate_size,
    }
    mistakes = [
        *_tensor_mistakes(parallel, shared),
        *_pipeline_mistakes(parallel, num_layers),
        *_expert_mistakes(parallel, num_experts),
    ]
    if mistakes:
        raise ConfigError("the model does not fit the layout:\n" + "\n".join(mistakes))


def _tensor_mistakes(parallel: ParallelConfig, shared: dict[str, int]) -> Iterator[str]:
    size = parallel.tensor_model_parallel_size
    wrong = [f"{name} ({number})" for name, number in shared.items() if number % size]
    if wrong:
        common = math.gcd(*shared.values())
        fitting = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
        yield (
            f"  parallel.tensor_model_parallel_size = {size}: must divide the model's "
            f"{' and '.join(wrong)}; this model can take {fitting}"
        )


def _pipeline_mistakes(parallel: ParallelConfig, num_layers: int) -> Iterator[str]:
    """Megatron's rule: each stage that is not given its own number of layers gets an equal share,
    and every stage's layers divide into the virtual chunks."""
    ends = {
        f"parallel.{name}": layers
        for name in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
        if (layers := getattr(parallel, name)) is not None
    }
    stages = parallel.pipeline_model_parallel_size - len(ends)
    layers = num_layers - sum(ends.values())
    if layers < 0 or (layers == 0) != (stages == 0) or (stages and layers % stages):
        where = "".join(f" less {key} ({number})" for key, number in ends.items())
        yield (
            "  parallel.pipeline_model_parallel_size = "
            f"{parallel.pipeline_model_parallel_size}: {stages} equal stages cannot share "
            f"{layers} layers (the model's {num_layers}{where}); change the number of stages, or "
            "give the first or last stage its own number of layers"
        )
        return
    chunks = parallel.virtual_pipeline_model_parallel_size
    per_stage = ends | ({"each stage": layers // stages} if stages else {})
    for where, number in per_stage.items():
        if chunks is not None and number % chunks:
            yield (
                f"  parallel.virtual_pipeline_model_parallel_size = {chunks}: must divide the "
                f"{number} layers of {where}; take a divisor of {number} or remove it"
            )


def _expert_mistakes(parallel: ParallelConfig, num_experts: int | None) -> Iterator[str]:
    size = parallel.expert_model_parallel_size
    if num_experts is None:
        if size > 1:
            yield (
                f"  parallel.expert_model_parallel_size = {size}: the model has no experts; set it "
                "to 1: the ranks are data-parallel all the same"
            )
        return
    if num_experts % size:
        fitting = ", ".join(str(n) for n in range(1, num_experts + 1) if num_experts % n == 0)
        yield (
            f"  parallel.expert_model_parallel_size = {size}: must divide the model's experts "
            f"({num_experts}); this model can take {fitting}"
        )
    if parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel:
        yield (
            "  parallel.sequence_parallel = False: without it each of the "
            f"{parallel.tensor_model_parallel_size} tensor-parallel ranks would send every token "
            "to the experts again, and their gradients would count it as often; set it to true"
        )
