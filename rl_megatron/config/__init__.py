"""What a run is: strict models, the YAML loader and the command line. Never imports torch."""

from rl_megatron.config.command_line import parse_command_line
from rl_megatron.config.layout import check_model_fits, check_world_size
from rl_megatron.config.loader import build_run, dump_run, load_run
from rl_megatron.config.preference_runs import DPORun, KTORun, ReferencedRun
from rl_megatron.config.runs import GRPORun, RewardModelRun, SFTRun

__all__ = [
    "DPORun",
    "GRPORun",
    "KTORun",
    "ReferencedRun",
    "RewardModelRun",
    "SFTRun",
    "build_run",
    "check_model_fits",
    "check_world_size",
    "dump_run",
    "load_run",
    "parse_command_line",
]
