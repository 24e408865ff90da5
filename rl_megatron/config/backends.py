"""What each backend can do, in settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Literal

from rl_megatron.config.base import Idle, Problem
from rl_megatron.config.deepspeed import DeepSpeedConfig, json_problems
from rl_megatron.config.model import ModelConfig
from rl_megatron.config.optimizer import OptimizerConfig
from rl_megatron.config.parallel import ClusterConfig, ParallelConfig

Backend = Literal["megatron", "deepspeed", "torch"]

ENGINES = {"megatron": "megatron", "deepspeed": "hf", "torch": "hf"}
"""The rollout engine that samples from the weights of a backend."""

_DEGREES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
)
_WHOLE_MODEL = {
    "deepspeed": "backend deepspeed shares a model by ZeRO (deepspeed.zero_stage)",
    "torch": "backend torch runs in one process",
}


def zero_problems(
    deepspeed: DeepSpeedConfig, model: ModelConfig, optimizer: OptimizerConfig
) -> Iterator[Problem]:
    """What of `deepspeed` does not fit the rest of a run with that backend."""
    if deepspeed.zero_stage == 0 and model.dtype == "bfloat16":
        yield Problem(
            "deepspeed.zero_stage",
            0,
            "DeepSpeed would add up gradients in bfloat16; take 1 or more, or model.dtype=float32",
            others=("model.dtype",),
        )
    for problem in json_problems(deepspeed, model.dtype, optimizer.clip_grad):
        yield replace(problem, key=f"deepspeed.{problem.key}")


def backend_problems(
    backend: Backend, model: ModelConfig, parallel: ParallelConfig, cluster: ClusterConfig
) -> Iterator[Problem]:
    """Settings that the backend does not have."""
    if backend == "megatron":
        return
    if model.moe_aux_loss_coeff:
        yield Problem(
            "model.moe_aux_loss_coeff",
            model.moe_aux_loss_coeff,
            f"backend {backend} has no balance loss; remove this key or set backend=megatron",
            others=("backend",),
        )
    for key in _DEGREES:
        size = getattr(parallel, key)
        if size > 1:
            yield Problem(
                f"parallel.{key}",
                size,
                f"{_WHOLE_MODEL[backend]}; set it to 1 or set backend=megatron",
                others=("backend",),
            )
    if backend == "torch" and (cluster.world_size or 1) > 1:
        yield Problem(
            "cluster.gpus_per_node",
            cluster.gpus_per_node,
            f"backend torch runs in one process, not {cluster.world_size}; set "
            "cluster.num_nodes and this to 1, or take another backend",
            others=("backend", "cluster.num_nodes"),
        )


def backend_idle(backend: Backend) -> Mapping[str, Idle]:
    """Settings that only another backend reads."""
    if backend == "deepspeed":
        reason = "deepspeed.zero_stage says what the ranks share; remove this key"
        return {"parallel.use_distributed_optimizer": Idle(reason, ("backend",))}
    reason = f"backend is {backend}; set backend=deepspeed, or remove this section"
    return {"deepspeed": Idle(reason, ("backend",))}
