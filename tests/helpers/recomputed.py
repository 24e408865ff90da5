"""Whether the head's logits are computed a second time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest


def count_recomputed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets a row for each time the backward pass computes logits anew."""
    from rl_megatron.kernels.linear_logprob import one_pass, op

    found: list[int] = []

    def counted(original: Callable[..., Any], problem: Any, *arguments: Any) -> Any:
        found.append(len(problem.hidden))
        return original(problem, *arguments)

    for module in (one_pass, op):
        monkeypatch.setattr(module, "add_gradients", partial(counted, module.add_gradients))
    return found
