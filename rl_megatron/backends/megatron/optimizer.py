"""Megatron's data parallelism and optimizer around a model's chunks."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer

from rl_megatron.config.optimizer import OptimizerConfig
from rl_megatron.models.gpt_model import HiddenStatesModel


def wrap_chunks(
    chunks: list[HiddenStatesModel], distributed: bool
) -> list[DistributedDataParallel]:
    """The chunks with fp32 gradient buffers, summed (never averaged) over data-parallel ranks."""
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=distributed
    )
    return [
        DistributedDataParallel(
            chunk.config, config, chunk, disable_bucketing=index > 0 or not distributed
        )
        for index, chunk in enumerate(chunks)
    ]


def finalize_gradients(model: list[torch.nn.Module], num_tokens: Any, **groups: Any) -> None:
    """Sum the gradients over ranks. Megatron's token count is not ours to divide by: it is 0.

    Losses are shares of the mini-batch, divided by its global counts before the backward pass, so
    the sum over micro-batches and ranks already is the gradient.
    """
    del num_tokens
    finalize_model_grads(model, None, **groups)


def build_optimizer(
    chunks: list[DistributedDataParallel],
    settings: OptimizerConfig,
    dtype: torch.dtype,
    distributed: bool,
) -> Any:
    """Megatron's AdamW; `apply_settings` sets the numbers of each step."""
    config = MegatronOptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        min_lr=settings.min_lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.adam_beta1,
        adam_beta2=settings.adam_beta2,
        adam_eps=settings.adam_eps,
        clip_grad=settings.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=distributed,
    )
    return get_megatron_optimizer(config, chunks)


def apply_settings(optimizer: Any, settings: OptimizerConfig, lr: float) -> None:
    """Set the numbers of the next step; biases and norms have no weight decay.

    Megatron leaves the two rates to a scheduler of its own, which is not used here, and loading a
    checkpoint brings back the numbers of the run that saved it: the settings of this run count.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
        group["weight_decay"] = settings.weight_decay * group["wd_mult"]
        group["betas"] = (settings.adam_beta1, settings.adam_beta2)
        group["eps"] = settings.adam_eps
