"""Token ids laid end to end, and how they are dealt to ranks and micro-batches.

Nothing here sees a tokenizer: ids are trained as they came.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch

from rl_megatron.data.examples import Example, PreferencePair
from rl_megatron.errors import ConfigError, RolloutError
from rl_megatron.interfaces.batch import PackedBatch
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
    """

    micro_batch_size: int | None = None
    max_tokens_per_micro_batch: int | None = None

    def __post_init__(self) -> None:
        assert (self.micro_batch_size is None) != (self.max_tokens_per_micro_batch is None)


def pack_sft(examples: Sequence[Example]) -> PackedBatch:
    """The examples in order; sequence_ids are their places in `examples`."""
    return _pack([(example.prompt_ids, example.response_ids) for example in examples])


def pack_preferences(pairs: Sequence[PreferencePair]) -> PackedBatch:
    """The pairs in order: chosen, rejected, chosen, rejected, ..."""
    sides = [side for pair in pairs for side in (pair.chosen, pair.rejected)]
    return _pack([(side.prompt_ids, side.response_ids) for side in sides], paired=True)


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
    mask: list[bool] = []
    bounds = [0]
    for prompt_ids, response_ids in sequences:
        start = len(tokens)
        tokens += [*prompt_ids, *response_ids]
        mask += [False] * len(prompt_ids) + [True] * len(response_ids)
        if len(tokens) > start:
            mask[start] = False  # A first token has no log-prob.
        bounds.append(len(tokens))
    return PackedBatch(
        tokens=torch.tensor(tokens, dtype=torch.int64),
        cu_seqlens=torch.tensor(bounds, dtype=torch.int64),
        response_mask=torch.tensor(mask, dtype=torch.bool),
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
    packed = _place(heaviest_first, weights, costs, capacity, [], _first)
    packed += [_Bin() for _ in range(-len(packed) % multiple if packed else multiple)]
    empty = [_Bin() for _ in packed]
    spread = _place(heaviest_first, weights, costs, capacity, empty, _least_cost)
    # Even filling may fail to fit where the tight one did.
    return spread if len(spread) == len(packed) else packed


def _place(
    order: Sequence[int],
    weights: Sequence[int],
    costs: Sequence[float],
    capacity: int,
    bins: list[_Bin],
    choose: Callable[[list[_Bin]], _Bin],
) -> list[_Bin]:
    """The bins after every unit went where `choose` says; a new bin opens where none has room."""
    for unit in order:
        fitting = [b for b in bins if b.weight + weights[unit] <= capacity]
        if not fitting:
            bins.append(_Bin())
            fitting = bins[-1:]
        choose(fitting).add(unit, weights[unit], costs[unit])
    return bins


def _first(bins: list[_Bin]) -> _Bin:
    return bins[0]


def _least_cost(bins: list[_Bin]) -> _Bin:
    return min(bins, key=lambda b: b.cost)


def _deal(bins: Sequence[_Bin], num_ranks: int) -> list[list[_Bin]]:
    """The same number of bins to every rank, costliest first, each to the rank with least."""
    share = len(bins) // num_ranks
    ranks = [_Bin() for _ in range(num_ranks)]
    for index in sorted(range(len(bins)), key=lambda i: (-bins[i].cost, i)):
        open_ranks = [rank for rank in ranks if len(rank.items) < share]
        _least_cost(open_ranks).add(index, 1, bins[index].cost)
    return [[bins[index] for index in rank.items] for rank in ranks]
