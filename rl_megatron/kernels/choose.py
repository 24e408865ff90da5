"""Whether a loss is computed by a kernel, by the name in a run's settings and by device."""

from __future__ import annotations

import importlib.util
import os

import torch


def loss_kernel_on(device: torch.device, name: str) -> bool:
    """Whether `kernels.losses` = `name` means a Triton kernel for tensors on `device`.

    The same loss is computed on the host too, for held-out rows: there it is torch's under every
    name, unless Triton interprets its kernels.
    """
    if name == "torch" or importlib.util.find_spec("triton") is None:
        return False
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return device.type == "cuda" or (name == "triton" and interpreted)
