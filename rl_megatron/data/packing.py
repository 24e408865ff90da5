"""Token ids laid end to end, and how they are dealt to ranks and micro-batches.

Nothing here sees a tokenizer: ids are trained as they came.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace

import numpy as np
import torch

from rl_megatron.data.examples import Example, JudgedExample, PreferencePair
from rl_megatron.errors import ConfigError, RolloutError
from rl_megatron.interfaces.batch import JudgedBatch, PackedBatch
from rl_megatron.interfaces.records import Rollout

TokenIds = Sequence[int]

# Attention costs as much as everything else in a layer where a sequence has about 6 x hidden_size
# tokens; this is for 4096. The plan needs no better number.
_TOKENS_OF_EQUAL_COST = 24_576


@dataclass(frozen=True)
class MicroBatching:
    """How much goes through the model at once; exactly one of the two is set.

    Attributes:
        micro_batch_size: Sequences (pairs, if paired) of a micro-batch at most.
        max_tokens_per_micro_batch: Tokens of a micro-batch at most.
        packed: Sequences end to end; otherwise each is padded to the longest of its micro-batch.
    """

    micro_batch_size: int | None = None
    max_tokens_per_micro_batch: int | None = None
    packed: bool = True

    def __post_init__(self) -> None:
        assert (self.micro_batch_size is None) != (self.max_tokens_per_micro_batch is None)


def pack_sft(examples: Sequence[Example]) -> PackedBatch:
    """The examples in order; sequence_ids are their places in `examples`."""
    return _pack([(example.prompt_ids, example.response_ids) for example in examples])


def pack_preferences(pairs: Sequence[PreferencePair]) -> PackedBatch:
    """The pairs in order: chosen, rejected, chosen, rejected, ...; with margins if all have one."""
    sides = [side for pair in pairs for side in (pair.chosen, pair.rejected)]
    batch = _pack([(side.prompt_ids, side.response_ids) for side in sides], paired=True)
    margins = [pair.margin for pair in pairs if pair.margin is not None for _ in range(2)]
    if not margins:
        return batch
    assert len(margins) == batch.num_sequences, "margins are given for all pairs or for none"
    return batch.with_fields(margins=torch.tensor(margins, dtype=torch.float32))


def pack_judged(examples: Sequence[JudgedExample]) -> JudgedBatch:
    """The examples in order, with their verdicts; and the same prompts with borrowed responses."""
    verdicts = torch.tensor([example.desirable for example in examples], dtype=torch.bool)
    rows = pack_sft(examples).with_fields(desirable=verdicts)
    if not any(example.borrowed_ids for example in examples):
        return JudgedBatch(rows)
    return JudgedBatch(rows, _pack([(e.prompt_ids, e.borrowed_ids) for e in examples]))


def pack_rollouts(
    rollouts: Sequence[Rollout], stop_token_ids: Collection[int] | None = None
) -> PackedBatch:
    """The rollouts in order, with `rollout_logprobs` (0 on prompt tokens).

    Args:
        rollouts: As the engine returned them.
        stop_token_ids: Of the sampling; given them, a rollout that stopped without one is refused.

    Raises:
        RolloutError: A rollout does not hang together and must not be trained on.
    """
    for rollout in rollouts:
        _check_rollout(rollout, stop_token_ids)
    batch = _pack([(rollout.prompt.token_ids, rollout.response_ids) for rollout in rollouts])
    logprobs = torch.zeros(batch.num_tokens)
    sampled = [value for rollout in rollouts for value in rollout.rollout_logprobs]
    # Prompts are never empty, so the mask covers exactly the sampled tokens.
    logprobs[batch.response_mask] = torch.tensor(sampled, dtype=torch.float32)
    return batch.with_fields(rollout_logprobs=logprobs)


def plan_micro_batches(
    lengths: Sequence[int],
    paired: bool,
    num_ranks: int,
    micro_batching: MicroBatching,
    multiple_of: int = 1,
) -> list[list[list[int]]]:
    """Indices of sequences: per data-parallel rank, per micro-batch.

    Micro-batches are about memory and time only; no number of a step depends on the plan.
    All ranks get the same number of micro-batches, those at the end may be empty. Chosen and
    rejected of a pair stay together and adjacent. The plan depends on the arguments only.

    Args:
        lengths: Tokens of each sequence.
        paired: Sequences 2i and 2i + 1 belong together.
        num_ranks: Data-parallel ranks.
        micro_batching: What a micro-batch may hold.
        multiple_of: The number of micro-batches of a rank is a multiple of this; the interleaved
            pipeline schedule asks for the number of stages.

    Raises:
        ConfigError: One sequence or pair alone exceeds the token budget.
    """
    width = 2 if paired else 1
    units = [range(start, start + width) for start in range(0, len(lengths), width)]
    costs = [sum(_cost(lengths[i]) for i in unit) for unit in units]
    budget = micro_batching.max_tokens_per_micro_batch
    if budget is not None:
        weights = [sum(lengths[i] for i in unit) for unit in units]
        _check_longest(max(weights, default=0), budget, paired)
    else:
        weights = [1] * len(units)
    capacity = budget or micro_batching.micro_batch_size or 0
    bins = _fill(weights, costs, capacity, num_ranks * multiple_of)
    dealt = _deal(bins, num_ranks)
    return [[[i for u in sorted(b.items) for i in units[u]] for b in rank] for rank in dealt]


def _check_rollout(rollout: Rollout, stop_token_ids: Collection[int] | None) -> None:
    ids, logprobs = rollout.response_ids, rollout.rollout_logprobs
    problem = None
    if not rollout.prompt.token_ids:
        problem = "its prompt has no token"
    elif len(ids) != len(logprobs):
        problem = f"it has {len(ids)} response tokens but {len(logprobs)} log-probs"
    elif not all(map(math.isfinite, logprobs)):
        problem = "a log-prob of it is not finite"
    elif (
        stop_token_ids is not None
        and rollout.finish_reason == "stop"
        and ids[-1:] not in {(stop,) for stop in stop_token_ids}
    ):
        problem = f'it finished with "stop", but no stop token ({sorted(stop_token_ids)}) ends it'
    if problem:
        raise RolloutError(
            f"rollout {rollout.sample_index} of prompt row {rollout.prompt.row_id}: {problem}; the "
            "engine must return every sampled token, the stop token included, with its log-prob"
        )


def _pack(sequences: Sequence[tuple[TokenIds, TokenIds]], paired: bool = False) -> PackedBatch:
    """Prompt and response of each sequence; the mask comes from their lengths, never from ids."""
    tokens: list[int] = []
    bounds = [0]
    for prompt_ids, response_ids in sequences:
        tokens += prompt_ids
        tokens += response_ids
        bounds.append(len(tokens))
    mask = torch.zeros(len(tokens), dtype=torch.bool)
    for (prompt_ids, _), start, end in zip(sequences, bounds, bounds[1:], strict=False):
        mask[start + max(1, len(prompt_ids)) : end] = True  # A first token has no log-prob.
    return PackedBatch(
        # torch takes longer than numpy over a list.
        tokens=torch.from_numpy(np.array(tokens, dtype=np.int64)),
        cu_seqlens=torch.tensor(bounds, dtype=torch.int64),
        response_mask=mask,
        sequence_ids=torch.arange(len(sequences)),
        paired=paired,
    )


@dataclass
class _Bin:
    """A micro-batch that is being filled, or a rank: what is in it and how much that is."""

    items: list[int] = field(default_factory=list)
    weight: int = 0
    cost: float = 0.0

    def add(self, item: int, weight: int, cost: float) -> None:
        self.items.append(item)
        self.weight += weight
        self.cost += cost


def _cost(length: int) -> float:
    return length + length**2 / _TOKENS_OF_EQUAL_COST


def _check_longest(longest: int, budget: int, paired: bool) -> None:
    if longest > budget:
        what = "a pair (chosen and rejected together)" if paired else "a sequence"
        raise ConfigError(
            f"train.max_tokens_per_micro_batch is {budget}, but {what} has {longest} tokens; raise "
            f"it to {longest} or more, or allow shorter sequences only"
        )


def _fill(
    weights: Sequence[int], costs: Sequence[float], capacity: int, multiple: int
) -> list[_Bin]:
    """As few bins as first-fit decreasing needs, rounded up to `multiple`, filled evenly."""
    heaviest_first = sorted(range(len(weights)), key=lambda u: (-weights[u], u))
    units = [(u, weights[u], costs[u]) for u in heaviest_first]
    tight = _fill_tightly(units, capacity)
    tight += [_Bin() for _ in range(-len(tight) % multiple if tight else multiple)]
    # Even filling may have no room for something where the tight one did.
    return _fill_evenly(units, capacity, len(tight)) or tight


def _fill_tightly(units: Sequence[tuple[int, int, float]], capacity: int) -> list[_Bin]:
    """Each unit (item, weight, cost) in the first bin with room for it."""
    bins: list[_Bin] = []
    not_full: list[_Bin] = []
    for unit in units:
        target = next((b for b in not_full if b.weight + unit[1] <= capacity), None)
        if target is None:
            target = _Bin()
            bins.append(target)
            not_full.append(target)
        target.add(*unit)
        # The last unit is the lightest.
        if target.weight + units[-1][1] > capacity:
            not_full.remove(target)
    return bins


def _fill_evenly(
    units: Sequence[tuple[int, int, float]], capacity: int, num_bins: int
) -> list[_Bin] | None:
    """Each unit in the bin that costs least of those with room; None where none has any."""
    bins = [_Bin() for _ in range(num_bins)]
    by_cost = [(0.0, index) for index in range(num_bins)]
    for unit in units:
        without_room = []
        while by_cost and bins[by_cost[0][1]].weight + unit[1] > capacity:
            without_room.append(heappop(by_cost))
        if not by_cost:
            return None
        target = bins[by_cost[0][1]]
        target.add(*unit)
        heapreplace(by_cost, (target.cost, by_cost[0][1]))
        for entry in without_room:
            # The last unit is the lightest: what has no room for it is full.
            if bins[entry[1]].weight + units[-1][1] <= capacity:
                heappush(by_cost, entry)
    return bins


def _deal(bins: Sequence[_Bin], num_ranks: int) -> list[list[_Bin]]:
    """The same number of bins to every rank, costliest first, each to the rank with least."""
    share = len(bins) // num_ranks
    ranks = [_Bin() for _ in range(num_ranks)]
    for index in sorted(range(len(bins)), key=lambda i: (-bins[i].cost, i)):
        open_ranks = [rank for rank in ranks if len(rank.items) < share]
        min(open_ranks, key=lambda r: r.cost).add(index, 1, bins[index].cost)
    return [[bins[index] for index in rank.items] for rank in ranks]
