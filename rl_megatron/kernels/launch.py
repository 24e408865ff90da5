"""The one way that a Triton kernel is started, so that launches can be counted and compiled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


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


@dataclass
class _Recording:
    run: bool
    launches: list[Launch] = field(default_factory=list)


_recordings: list[_Recording] = []


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **settings: Any) -> None:
    """Start a Triton kernel on `grid`."""
    for recording in _recordings:
        recording.launches.append(Launch(kernel, args, settings))
    if all(recording.run for recording in _recordings):
        kernel[grid](*args, **settings)


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
