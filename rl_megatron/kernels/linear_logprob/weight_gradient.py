"""Where the gradient of the head goes, a stretch of the vocabulary at a time, summed in float32."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from rl_megatron.kernels.linear_logprob.rows import RowKernels


@runtime_checkable
class WeightGradient(Protocol):
    """A gradient [V_local, H] that is filled in by stretches."""

    def open(self, columns: slice) -> Tensor:
        """[V, H] in float32 (float64) to add to."""
        ...

    def close(self, columns: slice, total: Tensor) -> None:
        """Take `total`, what `open` gave, as it is now."""
        ...

    def result(self) -> Tensor:
        """What to hand to autograd, in the shape and dtype of the weight."""
        ...


class Summed:
    """Added up where it will stay, as the weight is float32 (or float64) itself, or kept so until
    all of it is there. Rows of padding are exactly 0."""

    def __init__(self, weight: Tensor, dtype: torch.dtype):
        self.total = torch.zeros_like(weight, dtype=dtype, memory_format=torch.contiguous_format)
        self.dtype = weight.dtype

    def open(self, columns: slice) -> Tensor:
        """See `WeightGradient`."""
        return self.total[columns]

    def close(self, columns: slice, total: Tensor) -> None:
        """See `WeightGradient`; it is in place already."""

    def result(self) -> Tensor:
        """See `WeightGradient`."""
        return self.total.to(self.dtype)


class Rounded:
    """For a half-precision weight: each stretch is summed in float32 and rounded when it is done,
    so there is never a float32 gradient of the whole head. Each stretch is visited once."""

    def __init__(self, weight: Tensor):
        self.rounded = torch.zeros_like(weight, memory_format=torch.contiguous_format)

    def open(self, columns: slice) -> Tensor:
        """See `WeightGradient`."""
        return torch.zeros_like(self.rounded[columns], dtype=torch.float32)

    def close(self, columns: slice, total: Tensor) -> None:
        """See `WeightGradient`."""
        self.rounded[columns] = total

    def result(self) -> Tensor:
        """See `WeightGradient`."""
        return self.rounded


class ThreeBytes:
    """For a bfloat16 weight whose stretches are visited more than once: between visits a stretch is
    its bfloat16 and an 8-bit tail, 3 bytes where a float32 is 4 and a copy to hand over 2 more.

    A visit adds in float32 and rounds to 16 significant bits, 2^-16 of what is there; the last one
    leaves the bfloat16 that is handed over. So that is within 2^-8 (1 + visits / 256) of the sum
    where it did not cancel, and 2^-8 is what one rounding costs.
    """

    def __init__(self, weight: Tensor, kernels: RowKernels, longest: int):
        self.kernels = kernels
        self.high = torch.zeros_like(weight, memory_format=torch.contiguous_format)
        self.tail = torch.zeros_like(self.high, dtype=torch.int8)
        # One for all stretches: memory asked for anew at each visit has to be cleared anew.
        self.room = torch.empty_like(self.high[:longest], dtype=torch.float32)

    def open(self, columns: slice) -> Tensor:
        """See `WeightGradient`; what it gives is good until the next one is asked for."""
        high, tail = self.high[columns], self.tail[columns]
        total = self.room[: len(high)]
        self.kernels.join(high, tail, total)
        return total

    def close(self, columns: slice, total: Tensor) -> None:
        """See `WeightGradient`."""
        self.kernels.split(total, self.high[columns], self.tail[columns])

    def result(self) -> Tensor:
        """See `WeightGradient`."""
        return self.high


HeldWeight = Summed | ThreeBytes


class MainGrad:
    """Added to Megatron's `main_grad`, the float32 buffer that its optimizer reads.

    Megatron's hook leaves out `param.grad` once `grad_added_to_main_grad` is set; it wants to see
    one nevertheless. Where a tied embedding uses the weight, too, Megatron sets `zero_out_wgrad`,
    and the hook adds `param.grad`: by then the sum of this one and the embedding's. So it is 0.
    """

    def __init__(self, weight: Tensor):
        self.weight = weight

    def open(self, columns: slice) -> Tensor:
        """See `WeightGradient`."""
        into: Tensor = self.weight.main_grad[columns]  # type: ignore[attr-defined]
        return into

    def close(self, columns: slice, total: Tensor) -> None:
        """See `WeightGradient`; it is in place already."""

    def result(self) -> Tensor:
        """See `WeightGradient`."""
        self.weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        return torch.zeros_like(self.weight)


def has_main_grad(weight: Tensor) -> bool:
    """Whether `weight` is a parameter whose float32 `main_grad` is Megatron's to read.

    Not where Megatron's own FSDP holds it: there `main_grad` is made anew for each use.
    """
    main_grad = getattr(weight, "main_grad", None)
    return (
        weight.is_leaf
        and isinstance(main_grad, Tensor)
        and main_grad.dtype == torch.float32
        and main_grad.shape == weight.shape
        and hasattr(weight, "grad_added_to_main_grad")
        and not hasattr(weight, "__fsdp_param__")
    )


def weight_gradient(weight: Tensor, dtype: torch.dtype) -> WeightGradient:
    """Where a gradient goes whose stretches come one after the other, each once."""
    if has_main_grad(weight):
        return MainGrad(weight)
    return Summed(weight, dtype) if weight.dtype == dtype else Rounded(weight)


def held_gradient(
    weight: Tensor, dtype: torch.dtype, kernels: RowKernels, longest: int
) -> HeldWeight:
    """Where a gradient goes that is kept from the forward pass to the backward pass, and whose
    stretches, of `longest` rows at most, are visited for each chunk of rows. On a GPU it is
    float32, whose sums cuBLAS adds to itself."""
    if weight.dtype == torch.bfloat16 and not weight.is_cuda and not has_main_grad(weight):
        return ThreeBytes(weight, kernels, longest)
    return Summed(weight, dtype)


def delivered(weight: Tensor, total: HeldWeight) -> Tensor:
    """What to hand to autograd for a gradient that was summed ahead of the backward pass."""
    if isinstance(total, ThreeBytes) or not has_main_grad(weight):
        return total.result()
    target = MainGrad(weight)
    target.open(slice(None)).add_(total.total)
    return target.result()
