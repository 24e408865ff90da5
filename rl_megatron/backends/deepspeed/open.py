"""From a Hugging Face folder to a backend under ZeRO."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from rl_megatron.backends.deepspeed.backend import DeepSpeedBackend
from rl_megatron.backends.deepspeed.package import load_disk_reader
from rl_megatron.backends.deepspeed.scratch import Scratch
from rl_megatron.backends.deepspeed.weights import load_sharded
from rl_megatron.config.deepspeed import DeepSpeedConfig, engine_settings
from rl_megatron.config.optimizer import OptimizerConfig
from rl_megatron.data.packing import MicroBatching
from rl_megatron.models.transformers_model import load_transformers_model
from rl_megatron.models.transformers_policy import TransformersPolicy
from rl_megatron.parallel.process import Process


def open_deepspeed(
    folder: Path,
    process: Process,
    micro_batching: MicroBatching,
    config: DeepSpeedConfig,
    temperature: float = 1.0,
    dtype: torch.dtype = torch.float32,
    optimizer: OptimizerConfig | None = None,
    head_kernels: str = "auto",
    one_pass: bool = False,
    head: Tensor | None = None,
    recompute: str = "none",
) -> DeepSpeedBackend:
    """The model of a folder on the ranks of the job. Collective.

    Args:
        folder: Of a language model or of a reward model.
        process: This rank.
        micro_batching: How sequences are put together for one forward pass.
        config: What of it is shared.
        temperature: Logits are divided by it.
        dtype: Of weights and activations.
        optimizer: Adam's settings; None for a frozen model.
        head_kernels: Implementation of `linear_logprob`.
        one_pass: Compute the gradient of the head in the forward pass, where the loss allows it.
        head: A scalar head [1, H] in place of the folder's own, which makes it a reward model.
        recompute: As `model.recompute`.

    Raises:
        CheckpointError: The folder cannot be read as such a model.
        ConfigError: What is offloaded to nvme cannot be written there.
    """
    scratch = None
    if config.nvme_path is not None:
        load_disk_reader()
        scratch = Scratch(Path(config.nvme_path))
        config = config.model_copy(update={"nvme_path": str(scratch.folder)})
    clip_grad = 0.0 if optimizer is None else optimizer.clip_grad
    name = str(dtype).removeprefix("torch.")
    settings = engine_settings(config, name, clip_grad, process.layout.world_size)
    model = None
    if config.zero_stage == 3:
        model = load_sharded(folder, dtype, process, settings, head)
    if model is None:
        model = load_transformers_model(folder, dtype, process.device, head)
    policy = TransformersPolicy(model, temperature, head_kernels)
    if recompute == "full":
        policy.recompute_layers()
    return DeepSpeedBackend(policy, process, micro_batching, settings, optimizer, one_pass, scratch)
