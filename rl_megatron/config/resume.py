"""Which settings of a run may be others when it goes on from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rl_megatron.config.base import resolved
from rl_megatron.config.loader import build_run
from rl_megatron.config.runs import RunBase
from rl_megatron.errors import ConfigError

# Settings, and sections, that change no number of a run beyond rounding, or that the checkpoint
# speaks of itself: the rows of data are compared, not the path they came from.
_FREE = (
    "name",
    "output_dir",
    "cluster",
    "parallel",
    "deepspeed",
    "kernels",
    "checkpoint",
    "logging",
    "evaluation",
    "drift",
    "data.eval",
    "data.train.path",
    "model.make_vocab_size_divisible_by",
    "model.recompute",
    "reference.placement",
    "reference.precompute_ref_logprobs",
    "reference.cache",
    "reference.build_cache",
    "reference.verify_rows",
    "rollout.max_concurrent_sequences",
    "train.micro_batch_size",
    "train.max_tokens_per_micro_batch",
    "train.packed",
    "train.save_interval",
    "train.eval_interval",
    "train.log_interval",
)

_ABSENT = "not set"


def refused_changes(run: RunBase, saved: Mapping[str, Any]) -> list[str]:
    """`key: old -> new` of every setting that keeps `run` from going on where `saved` stopped.

    Args:
        run: What is to go on.
        saved: The resolved configuration that was saved.
    """
    old, new = dict(_flat(_with_defaults(run, saved))), dict(_flat(resolved(run)))
    return [
        f"{key}: {old.get(key, _ABSENT)} -> {new.get(key, _ABSENT)}"
        for key in sorted(old | new)
        if old.get(key, _ABSENT) != new.get(key, _ABSENT)
        and not _is_free(key)
        and not run.checkpoint.allows(key)
    ]


def _is_free(key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in _FREE)


def _with_defaults(run: RunBase, saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """Settings that came with a later version have their defaults in an older run too."""
    try:
        filled: Mapping[str, Any] = resolved(build_run(type(run), dict(saved)))
    except ConfigError:
        return saved
    return filled


def _flat(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
