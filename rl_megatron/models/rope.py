"""Rotary position settings: read from a Hugging Face config, turned into inverse frequencies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from rl_megatron.errors import CheckpointError
from rl_megatron.models.shape import RopeSettings

DEFAULT_THETA = 10000.0

_COMMON_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_KEYS_OF_TYPE = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    },
}


def parse_rope(config: Mapping[str, Any]) -> RopeSettings:
    """The rotary settings of a config.json, in its old or its new layout.

    Old: `rope_theta` beside `rope_scaling`; new (transformers 5): both inside `rope_parameters`.
    transformers lets the value inside the dict win over the one beside it; so do we.

    Raises:
        CheckpointError: A rope type or a key of the dict that is not implemented, or a missing key.
    """
    parameters = _rope_dict(config)
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    if rope_type not in _KEYS_OF_TYPE:
        raise CheckpointError(
            f"config.json: rope type {rope_type!r} is not implemented (known: "
            f"{', '.join(_KEYS_OF_TYPE)}); positions would silently be wrong. "
            "Use a model with one of the known types."
        )
    expected = _KEYS_OF_TYPE[rope_type]
    given = {key for key, value in parameters.items() if value is not None}
    # `original_max_position_embeddings` means nothing to the other types, and transformers
    # itself writes it beside them.
    unknown = given - _COMMON_KEYS - expected - {"original_max_position_embeddings"}
    if unknown or expected - given:
        raise CheckpointError(
            f"config.json: rope type {rope_type!r} needs the keys {sorted(expected)}; "
            f"missing {sorted(expected - given)}, not known {sorted(unknown)}. "
            "Check rope_parameters (or rope_scaling) against the model's own page."
        )
    rotated_share = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if rotated_share not in (None, 1.0):
        raise CheckpointError(
            f"config.json: partial_rotary_factor {rotated_share} is not implemented; "
            "use a model that rotates whole heads (1.0)."
        )
    theta = parameters.get("rope_theta") or config.get("rope_theta") or DEFAULT_THETA
    if rope_type == "default":
        return RopeSettings(float(theta))
    if rope_type == "linear":
        return RopeSettings(float(theta), "linear", factor=float(parameters["factor"]))
    return RopeSettings(
        theta=float(theta),
        scaling="llama3",
        factor=float(parameters["factor"]),
        low_freq_factor=float(parameters["low_freq_factor"]),
        high_freq_factor=float(parameters["high_freq_factor"]),
        original_max_position=int(parameters["original_max_position_embeddings"]),
    )


def _rope_dict(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Whichever of the two dicts is given; {} if none is."""
    old, new = config.get("rope_scaling"), config.get("rope_parameters")
    if old and new and old != new:
        raise CheckpointError(
            "config.json: rope_scaling and rope_parameters disagree "
            f"({old} and {new}); keep the one the model was trained with."
        )
    return new or old or {}


def inverse_frequencies(rope: RopeSettings, head_dim: int) -> Float[Tensor, " half"]:
    """Radians per position of each pair of dimensions, float32 [head_dim / 2], on the host.

    The order of operations is that of transformers, so that the values are equal bit by bit.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.scaling == "none":
        return plain
    if rope.scaling == "linear":
        return plain / rope.factor
    return _llama3_frequencies(plain, rope)


def _llama3_frequencies(
    plain: Float[Tensor, " half"], rope: RopeSettings
) -> Float[Tensor, " half"]:
    """Llama 3.1's scaling: by `factor` above the longest kept wavelength, a ramp below it."""
    wavelengths = 2 * math.pi / plain
    longest_scaled = rope.original_max_position / rope.low_freq_factor
    longest_kept = rope.original_max_position / rope.high_freq_factor
    scaled = torch.where(wavelengths > longest_scaled, plain / rope.factor, plain)
    ramp = (rope.original_max_position / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (wavelengths >= longest_kept) & (wavelengths <= longest_scaled)
    smoothed = (1 - ramp) * scaled / rope.factor + ramp * scaled
    return torch.where(between, smoothed, scaled)
