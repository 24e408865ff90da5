"""From groups of scored rollouts to preference pairs: the best response against the worst."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RolloutPair:
    """Two responses to one prompt.

    Attributes:
        row_id: Row of the prompt in the data of the run.
        step: The step at whose start they were sampled.
        chosen, rejected: Texts.
        margin: Reward of the chosen one less that of the rejected one.
    """

    row_id: int
    step: int
    chosen: str
    rejected: str
    margin: float


@dataclass
class PairCounts:
    """What became of the groups.

    Attributes:
        groups: Of how many rollouts each was, and how often.
        skipped: Why a group gave no pair, and how often.
    """

    groups: Counter[int] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)


def make_rollout_pairs(
    rollouts: Iterable[Mapping[str, Any]], min_margin: float, keep_truncated: bool = False
) -> tuple[list[RolloutPair], PairCounts]:
    """One pair for each group whose best and worst rewards are `min_margin` apart, or more.

    A group is all rollouts of one prompt in one rollout batch. Rollouts without a reward take no
    part; nor do cut ones, which have no end to learn, unless `keep_truncated`. Of equal rewards the
    first sample counts. A pair of the same two texts to the same prompt is given once.

    Args:
        rollouts: Rows of rollouts.jsonl.
        min_margin: Above 0.
        keep_truncated: Whether responses that were cut take part.
    """
    groups: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for rollout in rollouts:
        groups.setdefault((rollout["step"], rollout["row_id"]), []).append(rollout)
    counts, pairs, seen = PairCounts(), [], set()
    for (step, row_id), group in groups.items():
        counts.groups[len(group)] += 1
        usable = [
            rollout
            for rollout in sorted(group, key=lambda rollout: rollout["sample_index"])
            if rollout["reward"] is not None
            and (keep_truncated or rollout["finish_reason"] != "length")
        ]
        if len(usable) < 2:
            counts.skipped["fewer than two rollouts that count"] += 1
            continue
        best = max(usable, key=lambda rollout: rollout["reward"])
        worst = min(usable, key=lambda rollout: rollout["reward"])
        margin = best["reward"] - worst["reward"]
        if margin < min_margin:
            counts.skipped[f"rewards less than {min_margin:g} apart"] += 1
            continue
        key = (row_id, best["response"], worst["response"])
        if key in seen:
            counts.skipped["the same pair as before"] += 1
            continue
        seen.add(key)
        pairs.append(RolloutPair(row_id, step, best["response"], worst["response"], margin))
    return pairs, counts
