"""Which implementation of the row kernels computes, by name and device.

| name | what | where |
|---|---|---|
| `triton` | Triton kernels beside cuBLAS | a GPU |
| `cpu` | C++ kernels, compiled on first use | a CPU, with a C++ compiler |
| `torch` | plain torch | anywhere |
| `reference` | all logits and autograd, not of row kernels: an oracle | one rank |

`auto` takes the first that can be had. It depends on nothing but the machine, never on sizes: a row
must come out the same in a small batch and in a large one.
"""

from __future__ import annotations

import functools
import importlib.util
import logging

import torch

from rl_megatron.errors import ConfigError
from rl_megatron.kernels.linear_logprob.cpu_rows import CpuRows
from rl_megatron.kernels.linear_logprob.rows import RowKernels
from rl_megatron.kernels.linear_logprob.torch_rows import TorchRows
from rl_megatron.kernels.native import NativeError

SETTING = "kernels.linear_logprob"
NAMES = ("auto", "cpu", "triton", "torch", "reference")
_LOG = logging.getLogger(__name__)


def row_kernels(name: str, device: torch.device, dtype: torch.dtype = torch.float32) -> RowKernels:
    """The kernels called `name` for tensors on `device`; not for `reference`, which has none.

    Of float64, which is for checks, `auto` is torch's on a GPU: Triton's rows are float32.

    Raises:
        ConfigError: There is no such implementation, or not here.
    """
    if name == "auto" and dtype == torch.float64 and device.type == "cuda":
        name = "torch"
    return _row_kernels(name, device.type)


def describe(name: str, device: torch.device) -> str:
    """In words, what `name` computes with on `device`: a line of a run's header.

    Raises:
        ConfigError: As `row_kernels`.
    """
    if name == "reference":
        return "reference (all logits at once)"
    kernels = row_kernels(name, device)
    if isinstance(kernels, CpuRows):
        return f"cpu (compiled, {kernels.lanes} float32 at once)"
    if name == "auto" and device.type == "cpu":
        return f"torch (no compiled kernels: {_compiled_rows()[1]})"
    if name == "auto" and device.type == "cuda" and kernels.name == "torch":
        return "torch (Triton is not installed)"
    return kernels.name


@functools.cache
def _row_kernels(name: str, device_type: str) -> RowKernels:
    if name == "torch":
        return TorchRows()
    if name == "auto":
        return _best(device_type)
    if name == "triton":
        return _triton_rows(device_type)
    if name == "cpu":
        return _cpu_rows(device_type)
    raise ConfigError(f"{SETTING}: {name} is none of {', '.join(NAMES)}. Use auto.")


def _best(device_type: str) -> RowKernels:
    if device_type == "cuda" and importlib.util.find_spec("triton") is not None:
        return _triton_rows(device_type)
    if device_type == "cpu":
        kernels, reason = _compiled_rows()
        if kernels is not None:
            return kernels
        _LOG.warning("No compiled kernels for log-probs, torch is slower: %s", reason)
    return TorchRows()


def _triton_rows(device_type: str) -> RowKernels:
    if importlib.util.find_spec("triton") is None:
        raise ConfigError(f"{SETTING}: triton is not installed. pip install triton, or use auto.")
    # On a CPU these run under Triton's interpreter only, and say so themselves.
    from rl_megatron.kernels.linear_logprob.triton_rows import TritonRows

    return TritonRows()


def _cpu_rows(device_type: str) -> RowKernels:
    if device_type != "cpu":
        raise ConfigError(f"{SETTING}: cpu computes on a CPU, not on {device_type}. Use auto.")
    kernels, reason = _compiled_rows()
    if kernels is None:
        raise ConfigError(
            f"{SETTING}: cpu cannot be had here: {reason}. Install g++, or use auto or torch."
        )
    return kernels


@functools.cache
def _compiled_rows() -> tuple[CpuRows | None, str]:
    """The compiled kernels, or why there are none; tried once in a process."""
    try:
        return CpuRows(), ""
    except NativeError as error:
        return None, str(error)
