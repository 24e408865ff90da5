"""How the trainer's weights reach the engine: one verb, so that a recipe never asks which way."""

from rl_megatron.weight_sync.in_process import InProcessSync

__all__ = ["InProcessSync"]
