"""Attention of packed sequences in a transformers model: each sequence as if alone.

Sequences lie end to end in one row. transformers would mask all pairs of tokens in it; here each
sequence has the mask that its layer would give it alone (causal, sliding window, chunks), and the
same attention function that the model has anyway. Where that is the plain causal one, it is
computed as in Megatron's models: sequences of similar length together (span_attention.py).
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

from rl_megatron.models.span_attention import span_attention
from rl_megatron.models.spans import (
    Block,
    VariableLength,
    as_variable_length,
    find_spans,
    make_blocks,
)

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


@dataclass(frozen=True)
class CausalSequences:
    """The same, where every sequence has the plain causal mask; see `InSpans`."""

    blocks: list[Block]
    restore: Tensor
    variable_length: VariableLength | None

    @classmethod
    def within(cls, bounds: list[int], device: torch.device) -> CausalSequences:
        """Those that lie between `bounds`."""
        spans = find_spans(bounds, [(0, 0, bounds[-1])])
        kernel = as_variable_length(spans, device) if device.type == "cuda" else None
        return cls(*make_blocks(spans, device), kernel)


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


def _masks_with(make_mask: Callable[..., Tensor | None], may_join: bool) -> Callable[..., Any]:
    """How a model makes its masks, by the function of the attention that it has anyway.

    Args:
        make_mask: That function.
        may_join: Sequences with the plain causal mask may be computed together.
    """

    def masks(**settings: Any) -> Tensor | SequenceMasks | CausalSequences | None:
        bounds = _bounds.get()
        if bounds is None:
            return make_mask(**settings)

        def mask_of(start: int, end: int) -> Tensor | None:
            part = {"q_length": end - start, "kv_length": end - start}
            part |= {"q_offset": start, "kv_offset": start}
            return _or_causal(make_mask(**settings | part | {"allow_is_causal_skip": False}))

        sequences = list(zip(bounds, bounds[1:], strict=False))
        # Windows and chunks show in the longest sequence, if in any.
        longest = mask_of(*max(sequences, key=lambda sequence: sequence[1] - sequence[0]))
        if longest is None and may_join:
            return CausalSequences.within(bounds, settings["device"])
        return SequenceMasks(bounds, [mask_of(*sequence) for sequence in sequences])

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
        if not isinstance(mask, CausalSequences | SequenceMasks):
            return function(module, query, key, value, mask, **settings)
        if settings.get("position_bias") is not None:
            # Found when the model is tried, and told as a setting: see self_check.py.
            raise NotImplementedError("a bias of positions is of a whole row")
        if isinstance(mask, CausalSequences):
            return _joined(query, key, value, mask, settings.get("scaling")), None
        outputs = []
        for start, end, own in zip(mask.bounds, mask.bounds[1:], mask.masks, strict=False):
            part = (tensor[:, :, start:end] for tensor in (query, key, value))
            outputs.append(function(module, *part, own, **settings)[0])
        return torch.cat(outputs, dim=1), None

    return attend


def _joined(
    query: Tensor, key: Tensor, value: Tensor, mask: CausalSequences, scale: float | None
) -> Tensor:
    """[1, T, heads, head_dim] from queries, keys and values [1, heads, T, head_dim]."""
    rows = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return span_attention(*rows, mask, scale or query.shape[-1] ** -0.5)[None]


def _eager_of(module: nn.Module) -> Callable[..., Any]:
    """The plain attention of an architecture: each of transformers' files has its own."""
    function: Callable[..., Any] = sys.modules[type(module).__module__].eager_attention_forward
    return function


AttentionMaskInterface.register("sdpa_by_sequence", _masks_with(sdpa_mask, may_join=True))
AttentionMaskInterface.register("eager_by_sequence", _masks_with(eager_mask, may_join=False))
AttentionInterface.register("sdpa_by_sequence", _attention_with(lambda _: sdpa_attention_forward))
AttentionInterface.register("eager_by_sequence", _attention_with(_eager_of))
