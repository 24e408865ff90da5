"""A sum in three bytes: a bfloat16, which is the sum as it will be handed over, and what that is
short of as an 8-bit tail. Together they have 16 significant bits, half a step of which is 2^-16."""

from __future__ import annotations

import torch
from torch import Tensor


def join(high: Tensor, tail: Tensor, total: Tensor) -> None:
    """Write the sum to a float32 `total`, from its bfloat16 and its int8, all of one shape."""
    total.view(torch.int32).copy_((high.view(torch.int16).int() * 256 + tail) * 256)


def split(total: Tensor, high: Tensor, tail: Tensor) -> None:
    """Write a float32 `total` to `high` and `tail`, rounded to the nearest; NaN stays NaN."""
    # The bits of a float32 count up with its size, so a carry goes to the exponent as it should.
    # Not those of any NaN: one that is all ones would be carried to a 0.
    bits = torch.where(total.isnan(), torch.nan, total).view(torch.int32)
    kept = (bits + 0x80) >> 8
    upper = (kept + 0x80) >> 8
    high.view(torch.int16).copy_(upper)
    tail.copy_(kept - upper * 256)
