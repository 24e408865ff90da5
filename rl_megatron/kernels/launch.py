"""The one way that a Triton kernel is started, so that launches can be counted and compiled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

# Options that Triton knows for NVIDIA alone. `maxnreg` is a bound of registers per thread: without
# one the assembler spills some, to have more threads than kernels of so few blocks have use for.
NVIDIA_ONLY = frozenset({"maxnreg"})


@dataclass(frozen=True)
class Launch:
    """A kernel as it was started.

    Attributes:
        kernel: What `triton.jit` made.
        args: Its arguments in order, tensors as they were given.
        settings: Its constants and Triton's options, by name.
    """

    kernel: Any
    args: tuple[Any, ...]
    settings: dict[str, Any]

    def settings_on(self, backend: str) -> dict[str, Any]:
        """The settings that Triton's backend, cuda or hip, knows."""
        dropped = NVIDIA_ONLY if backend == "hip" else frozenset()
        return {name: value for name, value in self.settings.items() if name not in dropped}


@dataclass
class _Recording:
    run: bool
    launches: list[Launch] = field(default_factory=list)


_recordings: list[_Recording] = []


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **settings: Any) -> None:
    """Start a Triton kernel on `grid`."""
    started = Launch(kernel, args, settings)
    for recording in _recordings:
        recording.launches.append(started)
    if all(recording.run for recording in _recordings):
        kernel[grid](*args, **started.settings_on("hip" if torch.version.hip else "cuda"))


@contextmanager
def recorded(run: bool = True) -> Iterator[list[Launch]]:
    """The launches made inside, in order.

    Args:
        run: False only writes them down: what they would have written stays as it was. No GPU is
            needed then.
    """
    recording = _Recording(run)
    _recordings.append(recording)
    try:
        yield recording.launches
    finally:
        _recordings.remove(recording)
