"""The DeepSpeed backend: ZeRO over transformers models."""

from rl_megatron.backends.deepspeed.backend import DeepSpeedBackend
from rl_megatron.backends.deepspeed.open import open_deepspeed

__all__ = ["DeepSpeedBackend", "open_deepspeed"]
