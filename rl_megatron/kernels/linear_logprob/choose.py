"""Which implementation of the row kernels computes, by name and device."""

from __future__ import annotations

import importlib.util

import torch

from rl_megatron.errors import ConfigError
from rl_megatron.kernels.linear_logprob.rows import RowKernels
from rl_megatron.kernels.linear_logprob.torch_rows import TorchRows

SETTING = "kernels.linear_logprob"
NAMES = ("auto", "torch", "triton", "reference")


def row_kernels(name: str, device: torch.device) -> RowKernels:
    """The kernels called `name` for tensors on `device`.

    Raises:
        ConfigError: There is no such implementation, or not on this device.
    """
    if name == "torch" or (name == "auto" and not _has_triton(device)):
        return TorchRows()
    if name in ("auto", "triton"):
        from rl_megatron.kernels.linear_logprob.triton_rows import TritonRows

        return TritonRows()
    raise ConfigError(f"{SETTING}: {name} is none of {', '.join(NAMES)}. Use auto.")


def _has_triton(device: torch.device) -> bool:
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None
