"""The Megatron-Core backend."""

from rl_megatron.backends.megatron.backend import MegatronBackend
from rl_megatron.backends.megatron.reference import SwappedReference

__all__ = ["MegatronBackend", "SwappedReference"]
