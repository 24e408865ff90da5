"""`--trace-shapes`: every tensor on the way from data to gradient, shown once.

A stage says what it has with `trace("pack", "whole mini-batch, on every rank", batch=batch)`. The
first time it is reached on rank 0, name, shape, dtype and layout of each tensor are logged. While
tracing is off a call costs one comparison.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass

from torch import Tensor

logger = logging.getLogger(__name__)


class _Trace:
    def __init__(self) -> None:
        self.on = False
        self.shown: set[str] = set()


_TRACE = _Trace()


def start_trace(rank: int) -> None:
    """Show every stage once from now on, on rank 0."""
    _TRACE.on = rank == 0
    _TRACE.shown.clear()


def trace(stage: str, layout: str, /, **values: object) -> None:
    """Show the tensors of a stage, the first time it is reached.

    Args:
        stage: E.g. "rollout", "pack", "gradient".
        layout: How these tensors lie on ranks, in words.
        values: Tensors, numbers, records of tensors, mappings of tensors, or lists of records.
    """
    if not _TRACE.on or stage in _TRACE.shown:
        return
    _TRACE.shown.add(stage)
    lines = [line for name, value in values.items() for line in _describe(name, value)]
    logger.info("trace %s (%s)\n%s", stage, layout, "\n".join(lines))


def _describe(name: str, value: object) -> Iterator[str]:
    if isinstance(value, Tensor):
        kind = f"{str(value.dtype).removeprefix('torch.')} {value.device.type}"
        yield f"  {name:<64} {list(value.shape)!s:<18} {kind}"
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _describe(f"{name}.{field.name}", getattr(value, field.name))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _describe(f"{name}[{key}]", item)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        first = type(value[0]).__name__ if value else "nothing"
        yield f"  {name:<64} {[len(value)]!s:<18} list of {first}"
        if value and is_dataclass(value[0]):
            yield from _describe(f"{name}[0]", value[0])
    elif isinstance(value, bool | int | float):
        yield f"  {name:<64} {'[]':<18} {type(value).__name__} {value}"
