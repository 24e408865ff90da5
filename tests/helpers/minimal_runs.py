"""The least that each run must say."""

from typing import Any

import pytest

from rl_megatron.config import build_run
from rl_megatron.config.runs import RunBase
from rl_megatron.errors import ConfigError

SFT: dict[str, Any] = {
    "name": "a-run",
    "model": {"path": "models/tiny"},
    "data": {"train": {"path": "rows.jsonl"}},
    "train": {"num_steps": 100},
}

DPO: dict[str, Any] = SFT

KTO: dict[str, Any] = SFT

GRPO: dict[str, Any] = SFT | {
    "rewards": [{"name": "answer_tag"}],
    "train": {"num_rollout_batches": 10},
}


def with_settings(run: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """The run with settings changed; `rollout__group_size=4` sets rollout.group_size."""
    changed = dict(run)
    for key, value in settings.items():
        at, (*path, name) = changed, key.split("__")
        for part in path:
            at[part] = dict(at.get(part) or {})
            at = at[part]
        at[name] = value
    return changed


def complaint(run_class: type[RunBase], run: dict[str, Any], **settings: Any) -> str:
    """The one line of complaint, without its header."""
    with pytest.raises(ConfigError) as error:
        build_run(run_class, with_settings(run, **settings))
    header, *lines = str(error.value).splitlines()
    assert header == f"1 mistake in {run_class.__name__}:"
    return "\n".join(line.strip() for line in lines)
