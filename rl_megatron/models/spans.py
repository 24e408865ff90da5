"""Which queries attend to which keys, as blocks that one attention call can compute.

Packed sequences of similar length make one right-padded block with a causal mask; padding at the
right end is seen by no real query, and its outputs are dropped. Under context parallelism a rank
also holds queries from the middle of a sequence, whose keys begin before them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Bounds the mask of queries from the middle of a sequence: memory stays linear in tokens.
_QUERIES_PER_BLOCK = 512

Piece = tuple[int, int, int]
"""(local start, packed start, packed end): a run of packed tokens that this rank holds."""


@dataclass(frozen=True)
class Span:
    """Consecutive queries of one sequence.

    Attributes:
        query: Local place of the first query.
        key: Packed place of the sequence's first token.
        size: Queries.
        offset: Tokens of the sequence before the first query; query i sees offset + i + 1 keys.
    """

    query: int
    key: int
    size: int
    offset: int


@dataclass(frozen=True)
class Block:
    """Spans that are computed together.

    Attributes:
        query: [n, Q] local place of each query; padding repeats place 0.
        key: [n, K] packed place of each key; padding repeats place 0.
        real: [n, Q] True on real queries.
        offset: Of all its spans. 0: an ordinary causal mask, Q = K.
    """

    query: Tensor
    key: Tensor
    real: Tensor
    offset: int

    def mask(self) -> Tensor | None:
        """[Q, K] True where a query sees a key; None for an ordinary causal mask."""
        if self.offset == 0:
            return None
        device = self.query.device
        seen = self.offset + torch.arange(self.query.shape[1], device=device)
        return torch.arange(self.key.shape[1], device=device)[None] <= seen[:, None]


def find_spans(bounds: Sequence[int], pieces: Sequence[Piece]) -> list[Span]:
    """The spans of the sequences bounds[i] .. bounds[i + 1] that lie in this rank's pieces."""
    spans = []
    for local, start, end in pieces:
        for first, last in zip(bounds, bounds[1:], strict=False):
            begin, stop = max(first, start), min(last, end)
            step = stop - begin if begin == first else _QUERIES_PER_BLOCK
            for query in range(begin, stop, max(step, 1)):
                size = min(step, stop - query)
                spans.append(Span(local + query - start, first, size, query - first))
    return spans


def make_blocks(spans: Sequence[Span], device: torch.device) -> tuple[list[Block], Tensor]:
    """The spans in blocks: by length, cut where padding would exceed an eighth of a block.

    Returns:
        The blocks, and `restore` [T_local]: where each local token is among the real queries of
        all blocks laid end to end.
    """
    groups: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.offset > 0, -span.size)):
        longest = groups[-1][0].size if groups else 0
        fits = span.size >= min(longest - 8, longest * 7 // 8)
        if groups and fits and span.offset == groups[-1][0].offset == 0:
            groups[-1].append(span)
        else:
            groups.append([span])
    blocks, places = [], []
    for members in groups:
        offset, width = members[0].offset, members[0].size
        real = torch.arange(width)[None] < torch.tensor([span.size for span in members])[:, None]
        query = _places([span.query for span in members], width, real)
        wide = torch.nn.functional.pad(real, (offset, 0), value=True)
        key = _places([span.key for span in members], offset + width, wide)
        places.append(query[real])
        blocks.append(Block(query.to(device), key.to(device), real.to(device), offset))
    return blocks, torch.argsort(torch.cat(places)).to(device)


def _places(first: list[int], width: int, real: Tensor) -> Tensor:
    return torch.where(real, torch.tensor(first)[:, None] + torch.arange(width)[None], 0)


@dataclass(frozen=True)
class VariableLength:
    """The spans as one call of a variable-length kernel, whose causal mask ends with the keys.

    Attributes:
        query, key: Places of all spans' queries and keys, span after span.
        cu_query, cu_key: Boundaries of the spans [N + 1], int32.
        max_query, max_key: Longest span.
        restore: Where each local token is among `query`.
    """

    query: Tensor
    key: Tensor
    cu_query: Tensor
    cu_key: Tensor
    max_query: int
    max_key: int
    restore: Tensor


def as_variable_length(spans: Sequence[Span], device: torch.device) -> VariableLength:
    """The spans for a variable-length kernel on `device`."""
    queries = torch.tensor([span.size for span in spans])
    keys = torch.tensor([span.offset + span.size for span in spans])
    query = torch.cat([torch.arange(s.query, s.query + s.size) for s in spans])
    key = torch.cat([torch.arange(s.key, s.key + s.offset + s.size) for s in spans])
    return VariableLength(
        query=query.to(device),
        key=key.to(device),
        cu_query=_boundaries(queries).to(device),
        cu_key=_boundaries(keys).to(device),
        max_query=int(queries.max()),
        max_key=int(keys.max()),
        restore=torch.argsort(query).to(device),
    )


def _boundaries(sizes: Tensor) -> Tensor:
    return torch.nn.functional.pad(sizes.cumsum(0), (1, 0)).to(torch.int32)
