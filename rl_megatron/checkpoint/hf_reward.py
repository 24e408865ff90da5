"""The files around the weights of a reward model, from those of the language model it began as."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rl_megatron.checkpoint.hf_files import HEAD, RECORD_FILE, SCORE, read_json

CLASSIFIER = "ForSequenceClassification"


def become_reward_model(folder: Path) -> None:
    """Make the config.json in `folder`, and the record of tensors if there is one, those of
    transformers' `<Family>ForSequenceClassification` with one label.

    A folder that is one already is left as it is, byte by byte. `pad_token_id` becomes a token that
    ends no response: transformers reads the score at the last token that is not this one. Where
    there is none it becomes null, and transformers then takes one sequence at a time.
    """
    config = read_json(folder / "config.json")
    if any(name.endswith(CLASSIFIER) for name in config.get("architectures") or ()):
        return
    family = "".join(part.capitalize() for part in config["model_type"].split("_"))
    config["architectures"] = [family + CLASSIFIER]
    config["id2label"], config["label2id"] = {"0": "LABEL_0"}, {"LABEL_0": 0}
    config["pad_token_id"] = _padding(folder, config)
    _write(folder / "config.json", config)
    if (folder / RECORD_FILE).exists():
        record = read_json(folder / RECORD_FILE)
        tensors = {name: entry for name, entry in record["tensors"].items() if name != HEAD}
        norm = tensors["model.norm.weight"]
        tensors[SCORE] = {"dtype": norm["dtype"], "shape": [1, *norm["shape"]]}
        _write(folder / RECORD_FILE, record | {"tensors": dict(sorted(tensors.items()))})


def _padding(folder: Path, config: dict[str, Any]) -> int | None:
    """A token that ends no response: the padding token, or the one of unknown text."""
    tokenizer = _optional(folder / "tokenizer_config.json")
    ids = _added_tokens(folder, tokenizer)

    def named(key: str) -> int | None:
        token = tokenizer.get(key)
        return ids.get(token.get("content") if isinstance(token, dict) else token)

    generation = _optional(folder / "generation_config.json")
    ends = {named("eos_token"), *_ids(config.get("eos_token_id"))}
    ends |= set(_ids(generation.get("eos_token_id")))
    for candidate in (config.get("pad_token_id"), named("pad_token"), named("unk_token")):
        if candidate is not None and candidate not in ends:
            return int(candidate)
    return None


def _added_tokens(folder: Path, tokenizer: dict[str, Any]) -> dict[Any, int]:
    """Id of every token that the tokenizer's files list by its text."""
    listed = _optional(folder / "tokenizer.json").get("added_tokens") or []
    by_id = tokenizer.get("added_tokens_decoder") or {}
    found = {token["content"]: int(token["id"]) for token in listed}
    return found | {token["content"]: int(number) for number, token in by_id.items()}


def _ids(value: Any) -> Iterator[int]:
    """The ids that a config names: one, several, or none."""
    yield from value if isinstance(value, list) else [] if value is None else [value]


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
