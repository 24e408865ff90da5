"""A run's settings in DeepSpeed's own words."""

from __future__ import annotations

from typing import Any

import torch

from rl_megatron.config.deepspeed import DeepSpeedConfig, merge_settings
from rl_megatron.config.optimizer import OptimizerConfig
from rl_megatron.errors import ConfigError

_BUCKET_ELEMENTS = 50_000_000


def engine_settings(
    settings: DeepSpeedConfig,
    dtype: torch.dtype,
    optimizer: OptimizerConfig | None,
    world_size: int,
) -> dict[str, Any]:
    """What `deepspeed.initialize` takes as its configuration.

    Gradients are added up and reduced in float32 whatever the model's dtype is. DeepSpeed counts
    micro-batches of its own only to know when to reduce, which the backend tells it.

    Args:
        settings: The run's.
        dtype: Of the model.
        optimizer: Adam's settings; None for a frozen model.
        world_size: Ranks.

    Raises:
        ConfigError: The user's JSON contradicts the run.
    """
    is_bf16 = dtype == torch.bfloat16
    if settings.zero_stage == 0 and is_bf16 and optimizer is not None:
        raise ConfigError(
            "deepspeed.zero_stage = 0: DeepSpeed would add up gradients in bfloat16 there; take 1 "
            "or more, or model.dtype=float32"
        )
    zero: dict[str, Any] = {"stage": settings.zero_stage}
    for name in ("offload_optimizer", "offload_param"):
        zero[name] = {"device": getattr(settings, name)}
        if settings.nvme_path is not None:
            zero[name]["nvme_path"] = settings.nvme_path
    ours = {
        "train_batch_size": world_size,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0 if optimizer is None else optimizer.clip_grad,
        # A gradient that is not finite is then found in bfloat16 too.
        "bf16": {"enabled": is_bf16, "check_grad_overflow": True},
        "fp16": {"enabled": False},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }
    buckets = ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size")
    defaults = {"zero_optimization": dict.fromkeys(buckets, _BUCKET_ELEMENTS)}
    return merge_settings(settings.config_path, ours, defaults)
