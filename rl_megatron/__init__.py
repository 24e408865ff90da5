"""rl_megatron: GRPO and DPO at scale on Megatron-Core and DeepSpeed.

`rl_megatron/README.md` has the map: the layers, the data flows, where to add a thing.
"""

from rl_megatron.version import __version__

__all__ = ["__version__"]
