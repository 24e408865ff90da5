"""Attention of packed sequences in a transformers model: one call for each sequence, as if alone.

Sequences lie end to end in one row. transformers would mask all pairs of tokens in it; here each
sequence has the mask that its layer would give it alone (causal, sliding window, chunks), and the
same attention function that the model has anyway.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask

_bounds: ContextVar[list[int] | None] = ContextVar("bounds of packed sequences", default=None)


@dataclass(frozen=True)
class SequenceMasks:
    """In place of a mask, from where the model makes it to where its layers attend.

    Attributes:
        bounds: Sequence i is bounds[i] to bounds[i + 1].
        masks: Of each sequence; None: causal.
    """

    bounds: list[int]
    masks: list[Tensor | None]


def attend_by_sequence(model: PreTrainedModel) -> None:
    """Let a model's attention know of `packed_sequences`; outside of it nothing changes.

    A model that has no such choice is left as it is.
    """
    own = model.config._attn_implementation
    if own in ("sdpa", "eager") and model._can_set_attn_implementation():
        model.set_attn_implementation(f"{own}_by_sequence")


@contextmanager
def packed_sequences(bounds: list[int]) -> Iterator[None]:
    """Inside, a model is given one row of sequences."""
    token = _bounds.set(bounds)
    try:
        yield
    finally:
        _bounds.reset(token)


def _masks_with(make_mask: Callable[..., Tensor | None]) -> Callable[..., Any]:
    """How a model makes its masks, by the function of the attention that it has anyway."""

    def masks(**settings: Any) -> Tensor | SequenceMasks | None:
        bounds = _bounds.get()
        if bounds is None:
            return make_mask(**settings)
        found = []
        for start, end in zip(bounds, bounds[1:], strict=False):
            part = {"q_length": end - start, "kv_length": end - start}
            part |= {"q_offset": start, "kv_offset": start}
            found.append(make_mask(**settings | part | {"allow_is_causal_skip": False}))
        return SequenceMasks(bounds, [_or_causal(mask) for mask in found])

    return masks


def _or_causal(mask: Tensor | None) -> Tensor | None:
    """None for the plain causal mask [1, 1, L, L], for which there are faster kernels."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return None if torch.equal(mask, torch.ones_like(mask).tril()) else mask


def _attention_with(choose: Callable[[nn.Module], Callable[..., Any]]) -> Callable[..., Any]:
    """How a layer attends, by the function that it has anyway."""

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        **settings: Any,
    ) -> Any:
        function, mask = choose(module), attention_mask
        if not isinstance(mask, SequenceMasks):
            return function(module, query, key, value, mask, **settings)
        if settings.get("position_bias") is not None:
            raise NotImplementedError("a bias of positions is of a whole row")
        outputs = []
        for start, end, own in zip(mask.bounds, mask.bounds[1:], mask.masks, strict=False):
            part = (tensor[:, :, start:end] for tensor in (query, key, value))
            outputs.append(function(module, *part, own, **settings)[0])
        return torch.cat(outputs, dim=1), None

    return attend


def _eager_of(module: nn.Module) -> Callable[..., Any]:
    """The plain attention of an architecture: each of transformers' files has its own."""
    function: Callable[..., Any] = sys.modules[type(module).__module__].eager_attention_forward
    return function


AttentionMaskInterface.register("sdpa_by_sequence", _masks_with(sdpa_mask))
AttentionMaskInterface.register("eager_by_sequence", _masks_with(eager_mask))
AttentionInterface.register("sdpa_by_sequence", _attention_with(lambda _: sdpa_attention_forward))
AttentionInterface.register("eager_by_sequence", _attention_with(_eager_of))
