"""The new head of a reward model: of the seed alone, as wide as the model's own weights were."""

from dataclasses import replace

import torch

from rl_megatron.models.families import read_shape
from rl_megatron.models.fresh_head import fresh_head
from tests.helpers.tiny_model import make_tiny_hf


def test_a_fresh_head_depends_on_the_seed_alone(tmp_path):
    shape = replace(read_shape(make_tiny_hf(tmp_path)), hidden_size=4096, initializer_range=0.02)
    head = fresh_head(shape, seed=7)
    torch.manual_seed(0)
    assert torch.equal(fresh_head(shape, seed=7), head)
    assert not torch.equal(fresh_head(shape, seed=8), head)
    assert head.shape == (1, 4096) and head.dtype == torch.float32
    assert abs(float(head.std()) / 0.02 - 1) < 0.05
    assert abs(float(head.mean())) < 0.02 / 16
