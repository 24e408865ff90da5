"""What a run is: strict models, the YAML loader and the command line. Never imports torch."""

from rl_megatron.config.base import Problem, Strict, resolved
from rl_megatron.config.layout import check_model_fits, check_world_size
from rl_megatron.config.runs import DPORun, GRPORun, SFTRun

__all__ = [
    "DPORun",
    "GRPORun",
    "Problem",
    "SFTRun",
    "Strict",
    "check_model_fits",
    "check_world_size",
    "resolved",
]
