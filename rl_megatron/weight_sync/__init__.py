"""How the trainer's weights reach the engine: one verb, whichever way they go."""

from rl_megatron.weight_sync.in_process import InProcessSync

__all__ = ["InProcessSync"]
