"""DeepSpeed backends inside the processes of a pool."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rl_megatron.backends.deepspeed import DeepSpeedBackend, open_deepspeed
from rl_megatron.config.deepspeed import DeepSpeedConfig
from rl_megatron.config.optimizer import OptimizerConfig
from rl_megatron.data.packing import MicroBatching
from rl_megatron.parallel.process import Process
from tests.helpers.backend_contract import OPTIMIZER, TEMPERATURE, WHOLE

# Small parameters are shared too, or nothing of a tiny model would be.
SHARE_ALL = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}


def make_deepspeed(
    folder: Path,
    process: Process,
    zero_stage: int = 3,
    micro_batching: MicroBatching = WHOLE,
    optimizer: OptimizerConfig | None = OPTIMIZER,
    config: Mapping[str, Any] = MappingProxyType({}),
    **settings: Any,
) -> DeepSpeedBackend:
    """A backend with the weights of a folder; `config` holds settings of DeepSpeed."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(SHARE_ALL, file)
        file.flush()
        return open_deepspeed(
            folder,
            process,
            micro_batching,
            DeepSpeedConfig(zero_stage=zero_stage, config_path=file.name, **config),
            optimizer=optimizer,
            **{"temperature": TEMPERATURE, **settings},
        )
