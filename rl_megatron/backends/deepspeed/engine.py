"""DeepSpeed's engine around a policy, and Adam as the run wants it."""

from __future__ import annotations

from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import torch
from torch import nn

from rl_megatron.backends.deepspeed.package import load_deepspeed
from rl_megatron.config.optimizer import OptimizerConfig
from rl_megatron.models.transformers_policy import TransformersPolicy


def start_engine(
    policy: TransformersPolicy, settings: dict[str, Any], optimizer: OptimizerConfig | None
) -> Any:
    """The engine; a frozen model needs none below stage 3, and is its own.

    Args:
        policy: The model; its parameters become those of the engine.
        settings: From `engine_settings`.
        optimizer: Adam's settings; None for a frozen model.
    """
    is_sharded = settings["zero_optimization"]["stage"] == 3
    if optimizer is None and not is_sharded:
        return policy
    deepspeed = load_deepspeed()
    adam = None if optimizer is None else _adam(policy, optimizer, settings)
    # A part of it prints how much memory there is, whatever is logged.
    with redirect_stdout(StringIO()):
        engine, *_ = deepspeed.initialize(
            model=policy, optimizer=adam, config=settings, dist_init_required=False
        )
    policy.eval()
    if is_sharded:
        # The head's weight belongs to another module, the embedding or a layer that is not called.
        for parameter in policy.head.borrowed:
            deepspeed.zero.register_external_parameter(policy.head, parameter)
    return engine


def _shape_of(parameter: nn.Parameter) -> tuple[int, ...]:
    """Of the whole parameter, also where this rank holds only a part of it."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _adam(policy: nn.Module, optimizer: OptimizerConfig, settings: dict[str, Any]) -> Any:
    """AdamW; biases and norms have no weight decay."""
    parameters = list(policy.parameters())
    groups = [
        {"params": [p for p in parameters if len(_shape_of(p)) > 1]},
        {"params": [p for p in parameters if len(_shape_of(p)) <= 1], "weight_decay": 0.0},
    ]
    numbers: dict[str, Any] = {
        "lr": optimizer.lr,
        "betas": (optimizer.adam_beta1, optimizer.adam_beta2),
        "eps": optimizer.adam_eps,
        "weight_decay": optimizer.weight_decay,
    }
    is_offloaded = settings["zero_optimization"]["offload_optimizer"]["device"] != "none"
    if is_offloaded and torch.cuda.is_available():
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(groups, adamw_mode=True, **numbers)
    # One pass over the state, without the copies of it that several passes make.
    return torch.optim.AdamW(groups, fused=True, **numbers)
