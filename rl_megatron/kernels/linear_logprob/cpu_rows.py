"""`cpu`: row kernels in C++ for float32 on a CPU, one pass over a tile each."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from rl_megatron.kernels import native
from rl_megatron.kernels.linear_logprob.torch_rows import TorchRows

_SOURCE = Path(__file__).parent / "csrc" / "rows.cpp"


class CpuRows(TorchRows):
    """See `RowKernels`. Products, and all of float64, are torch's.

    Raises:
        NativeError: The kernels cannot be compiled or loaded on this machine.
    """

    name = "cpu"

    def __init__(self) -> None:
        self._library = native.load(_SOURCE)

    @property
    def lanes(self) -> int:
        """How many float32 are computed at once."""
        return int(self._library.rl_lanes())

    def statistics(
        self, logits: Tensor, column: Tensor, inv_temperature: Tensor, softcap: float | None
    ) -> Tensor:
        """See `RowKernels`."""
        if logits.dtype != torch.float32:
            return super().statistics(logits, column, inv_temperature, softcap)
        rows, width = logits.shape
        logits, column = logits.contiguous(), column.contiguous()
        inv_temperature = inv_temperature.contiguous()
        out = logits.new_empty(4, rows)
        self._library.rl_row_statistics(
            _pointer(logits),
            ctypes.c_int64(rows),
            ctypes.c_int64(width),
            _pointer(column),
            _pointer(inv_temperature),
            ctypes.c_float(softcap or 0.0),
            _pointer(out),
            ctypes.c_int32(torch.get_num_threads()),
        )
        return out

    def gradient(
        self,
        logits: Tensor,
        column: Tensor,
        inv_temperature: Tensor,
        softcap: float | None,
        top: Tensor,
        log_sum: Tensor,
        entropy: Tensor,
        g_logprob: Tensor,
        g_entropy: Tensor,
        dtype: torch.dtype,
    ) -> Tensor:
        """See `RowKernels`."""
        numbers = (top, log_sum, entropy, g_logprob, g_entropy)
        if logits.dtype != torch.float32:
            return super().gradient(logits, column, inv_temperature, softcap, *numbers, dtype)
        rows, width = logits.shape
        logits, column = logits.contiguous(), column.contiguous()
        inv_temperature = inv_temperature.contiguous()
        vectors = [x.contiguous() for x in numbers]
        self._library.rl_row_gradient(
            _pointer(logits),
            ctypes.c_int64(rows),
            ctypes.c_int64(width),
            _pointer(column),
            _pointer(inv_temperature),
            ctypes.c_float(softcap or 0.0),
            *map(_pointer, vectors),
            ctypes.c_int32(torch.get_num_threads()),
        )
        return logits.to(dtype)

    def join(self, high: Tensor, tail: Tensor, total: Tensor) -> None:
        """See `RowKernels`."""
        assert total.is_contiguous() and high.is_contiguous() and tail.is_contiguous()
        self._library.rl_join(
            _pointer(high), _pointer(tail), _pointer(total), *_count_and_threads(total)
        )

    def split(self, total: Tensor, high: Tensor, tail: Tensor) -> None:
        """See `RowKernels`."""
        assert total.is_contiguous() and high.is_contiguous() and tail.is_contiguous()
        self._library.rl_split(
            _pointer(total), _pointer(high), _pointer(tail), *_count_and_threads(total)
        )


def _count_and_threads(tensor: Tensor) -> tuple[ctypes.c_int64, ctypes.c_int32]:
    return ctypes.c_int64(tensor.numel()), ctypes.c_int32(torch.get_num_threads())


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
