"""What the attention of every layer needs to know about the tokens of one forward pass.

Megatron passes its `PackedSeqParams` untouched from the model's forward to the core attention.
Ours carries, besides the boundaries, the rotary tables, the blocks that attention is computed
in, and (in generation) the key-value cache. So positions, packing and caching live in one place.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from rl_megatron.models.balance import Balance
from rl_megatron.models.spans import (
    Block,
    VariableLength,
    as_variable_length,
    find_spans,
    make_blocks,
)
from rl_megatron.parallel.context import ContextSplit


class KeyValueCache:
    """Keys and values of the tokens seen so far, for the layers of this rank.

    `keys[layer]` and `values[layer]` are [num_sequences, max_tokens, kv_heads, head_dim]; they are
    allocated when a layer first writes. `lengths` [num_sequences] (on the host) counts the tokens
    in the cache before the current pass.
    """

    def __init__(self, num_sequences: int, max_tokens: int, device: torch.device) -> None:
        self.max_tokens = max_tokens
        self.device = device
        self.lengths = torch.zeros(num_sequences, dtype=torch.int64)
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def write(
        self, layer: int, rows: Tensor, positions: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Store key and value [T, kv_heads, head_dim] of tokens (rows, positions) of a layer."""
        if layer not in self.keys:
            shape = (len(self.lengths), self.max_tokens, *key.shape[1:])
            self.keys[layer] = key.new_zeros(shape)
            self.values[layer] = value.new_zeros(shape)
        self.keys[layer][rows, positions] = key
        self.values[layer][rows, positions] = value
        return self.keys[layer], self.values[layer]

    def keep(self, rows: Tensor) -> None:
        """Forget all sequences but `rows` (on the host), which move up in that order."""
        self.lengths = self.lengths[rows]
        index = rows.to(self.device)
        for store in (self.keys, self.values):
            for layer in store:
                store[layer] = store[layer][index]


@dataclass
class SequenceContext(PackedSeqParams):
    """Packed sequences of one forward pass (our `PackedSeqParams`).

    Attributes:
        cos, sin: Rotary tables [T, head_dim] of every token, fp32.
        blocks, restore: See `make_blocks`; no blocks when a cache is decoded.
        variable_length: The same for a kernel that takes all spans at once; on a GPU.
        split: How tokens lie on the context-parallel ranks; None where each holds all of them.
        cache: Key-value cache in generation, else None.
        rows, positions: [T] cache row and position of every token, with a cache.
        balance: For the routers of experts, in a step with a balance loss.
    """

    cos: Tensor = field(default_factory=lambda: torch.empty(0))
    sin: Tensor = field(default_factory=lambda: torch.empty(0))
    blocks: list[Block] = field(default_factory=list)
    restore: Tensor | None = None
    variable_length: VariableLength | None = None
    split: ContextSplit | None = None
    cache: KeyValueCache | None = None
    rows: Tensor | None = None
    positions: Tensor | None = None
    balance: Balance | None = None


def rotary_tables(positions: Tensor, inverse_frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [T, head_dim] fp32 for token positions [T] (Su et al. 2021, eq. 34).

    Halves, not neighbours, are rotated together, as Hugging Face checkpoints have it.
    """
    angles = positions.to(torch.float32)[:, None] * inverse_frequencies[None]
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def packed_context(
    cu_seqlens: Tensor,
    inverse_frequencies: Tensor,
    device: torch.device,
    split: ContextSplit | None = None,
) -> SequenceContext:
    """The context of whole sequences.

    Args:
        cu_seqlens: Their boundaries [N + 1], on the host.
        inverse_frequencies: Of the rotary embedding, on `device`.
        device: Of the model.
        split: Where this rank holds only a part of the tokens.
    """
    bounds = cu_seqlens.tolist()
    lengths = [last - first for first, last in zip(bounds, bounds[1:], strict=False)]
    positions = torch.cat([torch.arange(n) for n in lengths]).to(device)
    pieces = [(0, 0, bounds[-1])]
    if split is not None:
        positions, pieces = positions[split.local], split.pieces
    cos, sin = rotary_tables(positions, inverse_frequencies)
    spans = find_spans(bounds, pieces)
    blocks, restore = make_blocks(spans, device)
    on_device = cu_seqlens.to(device=device, dtype=torch.int32)
    return SequenceContext(
        qkv_format="thd",
        cu_seqlens_q=on_device,
        cu_seqlens_kv=on_device,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        cos=cos,
        sin=sin,
        blocks=blocks,
        restore=restore,
        variable_length=as_variable_length(spans, device) if device.type == "cuda" else None,
        split=split,
    )


def prefill_context(
    cu_seqlens: Tensor, inverse_frequencies: Tensor, cache: KeyValueCache, first_row: int
) -> SequenceContext:
    """The context of sequences that fill cache rows first_row, first_row + 1, ..."""
    context = packed_context(cu_seqlens, inverse_frequencies, cache.device)
    lengths = cu_seqlens[1:] - cu_seqlens[:-1]
    rows = first_row + torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    context.cache = cache
    context.rows = rows.to(cache.device)
    context.positions = torch.cat([torch.arange(n) for n in lengths.tolist()]).to(cache.device)
    cache.lengths[first_row : first_row + len(lengths)] = lengths
    return context


def decode_context(inverse_frequencies: Tensor, cache: KeyValueCache) -> SequenceContext:
    """The context of one new token for every sequence in the cache."""
    positions = cache.lengths.to(cache.device)
    cos, sin = rotary_tables(positions, inverse_frequencies)
    rows = torch.arange(len(positions), device=cache.device)
    return SequenceContext(
        qkv_format="thd", cos=cos, sin=sin, cache=cache, rows=rows, positions=positions
    )
