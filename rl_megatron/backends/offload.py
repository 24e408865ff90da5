"""Tensors set aside in host memory, in place: views stay views when they come back."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, UntypedStorage


class Offloaded:
    """Storages that gave their memory back, and the copies to refill them from.

    Megatron's parameters are views into large buffers that the optimizer also views. So storages
    are emptied and refilled, and no tensor is ever replaced.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[UntypedStorage, Tensor]] = []

    def take(self, tensors: Iterable[Tensor]) -> None:
        """Copy the storages of `tensors` to the host, each once, and free them."""
        seen = set()
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() == 0 or storage.data_ptr() in seen:
                continue
            seen.add(storage.data_ptr())
            kept = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=tensor.is_cuda)
            kept.copy_(_as_bytes(storage))
            self._kept.append((storage, kept))
        for storage, _ in self._kept:
            storage.resize_(0)

    def restore(self) -> None:
        """Put everything back where it was."""
        for storage, kept in self._kept:
            storage.resize_(kept.numel())
            _as_bytes(storage).copy_(kept)
        self._kept = []


def _as_bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
