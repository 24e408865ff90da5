"""The scalar head that a reward model begins with where its checkpoint has none."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rl_megatron.models.shape import ModelOutline, ModelShape

HEAD, SCORE = "lm_head.weight", "score.weight"
"""Hugging Face names of the head that it replaces, and its own."""


def fresh_head(shape: ModelShape | ModelOutline, seed: int) -> Tensor:
    """[1, hidden_size] float32, normal with the model's `initializer_range`.

    Drawn on the host from the seed alone, so that it is the same on every rank of every layout.
    """
    key = int(np.random.SeedSequence((seed, 0x5C0BE)).generate_state(1, np.uint64)[0])
    generator = torch.Generator().manual_seed(key % 2**63)
    return shape.initializer_range * torch.randn(1, shape.hidden_size, generator=generator)
