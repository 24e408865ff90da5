"""What decides the log-probs of given token ids: two caches with one fingerprint hold one truth."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any

FORMAT = 1
"""Of the files. A cache of another format is not read."""

# Of a model's shape: what starts weights, or limits lengths, changes no log-prob; and a model with
# a scalar head has none.
_NO_NUMBER = ("initializer_range", "max_position_embeddings", "scalar_head")


@dataclass(frozen=True)
class Fingerprint:
    """Everything that changes a log-prob, as plain values by dotted name.

    Layout, packing, batch sizes, kernels, seed, learning rate and beta are not among it: they
    change nothing, or nothing beyond rounding. Nor is the tokenizer: rows are known by their ids.
    """

    fields: dict[str, Any]

    @property
    def id(self) -> str:
        """16 hexadecimal digits."""
        text = json.dumps(self.fields, sort_keys=True)
        return blake2b(text.encode(), digest_size=8).hexdigest()

    def differences(self, other: Fingerprint) -> list[str]:
        """`name: old -> new` for every field in which `other` is another."""
        names = sorted(self.fields | other.fields)
        pairs = [(name, self.fields.get(name), other.fields.get(name)) for name in names]
        return [f"{name}: {old!r} -> {new!r}" for name, old, new in pairs if old != new]


def make_fingerprint(
    weights_digest: str, shape: Any, dtype: str, temperature: float = 1.0
) -> Fingerprint:
    """The fingerprint of a model.

    Args:
        weights_digest: Of the weights as the model holds them, see checkpoint/digest.py.
        shape: The model's `ModelShape`.
        dtype: Of weights and activations.
        temperature: Logits are divided by it.
    """
    fields: dict[str, Any] = {
        "format": FORMAT,
        "weights": weights_digest,
        "dtype": dtype,
        "temperature": float(temperature),
    }
    for name, value in asdict(shape).items():
        if name not in _NO_NUMBER:
            parts = value.items() if isinstance(value, dict) else [("", value)]
            fields |= {f"model.{name}.{key}".rstrip("."): part for key, part in parts}
    return Fingerprint(fields)
