"""The least that each run must say."""

from typing import Any

SFT: dict[str, Any] = {
    "name": "a-run",
    "model": {"path": "models/tiny"},
    "data": {"train": {"path": "rows.jsonl"}},
    "train": {"num_steps": 100},
}

DPO: dict[str, Any] = SFT

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
