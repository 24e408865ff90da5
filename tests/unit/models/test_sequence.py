"""Rotary tables and the cache of one forward pass."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from rl_megatron.models.rope import inverse_frequencies, parse_rope
from rl_megatron.models.sequence import (
    KeyValueCache,
    decode_context,
    packed_context,
    prefill_context,
    rotary_tables,
)
from tests.helpers.tiny_model import LLAMA3_ROPE

CPU = torch.device("cpu")


@pytest.mark.parametrize("rope", [{}, LLAMA3_ROPE, {"rope_type": "linear", "factor": 4.0}])
def test_rotary_tables_are_those_of_transformers(rope):
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        head_dim=16,
        max_position_embeddings=256,
        rope_parameters={"rope_theta": 10000.0, "rope_type": "default", **rope},
    )
    positions = torch.tensor([0, 1, 2, 31, 32, 33, 100, 255])
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    frequencies = inverse_frequencies(parse_rope(config.to_dict()), 16)
    found = rotary_tables(positions, frequencies)
    assert found[0].dtype == torch.float32
    torch.testing.assert_close(found[0], cos[0], atol=1e-6, rtol=0)
    torch.testing.assert_close(found[1], sin[0], atol=1e-6, rtol=0)


def test_positions_start_anew_with_every_sequence():
    frequencies = inverse_frequencies(parse_rope({}), 8)
    context = packed_context(torch.tensor([0, 3, 4, 6]), frequencies, CPU)
    cos, sin = rotary_tables(torch.tensor([0, 1, 2, 0, 0, 1]), frequencies)
    assert torch.equal(context.cos, cos) and torch.equal(context.sin, sin)
    assert context.cu_seqlens_q.tolist() == [0, 3, 4, 6]
    assert context.cu_seqlens_q.dtype == torch.int32
    assert context.max_seqlen_q == 3


def test_the_cache_holds_prompts_row_by_row_and_then_one_token_each():
    frequencies = inverse_frequencies(parse_rope({}), 8)
    cache = KeyValueCache(3, 6, CPU)
    keys = torch.arange(1.0, 7.0)[:, None, None].expand(6, 1, 8)
    first = prefill_context(torch.tensor([0, 2, 5]), frequencies, cache, first_row=0)
    cache.write(1, first.rows, first.positions, keys[:5], -keys[:5])
    second = prefill_context(torch.tensor([0, 1]), frequencies, cache, first_row=2)
    cache.write(1, second.rows, second.positions, keys[5:], -keys[5:])
    assert cache.lengths.tolist() == [2, 3, 1]
    assert cache.keys[1][:, :, 0, 0].tolist() == [
        [1, 2, 0, 0, 0, 0],
        [3, 4, 5, 0, 0, 0],
        [6, 0, 0, 0, 0, 0],
    ]
    # The prompt of the last row twice, the first not at all.
    cache.keep(torch.tensor([2, 1, 2]))
    assert cache.lengths.tolist() == [1, 3, 1]
    step = decode_context(frequencies, cache)
    assert step.positions.tolist() == [1, 3, 1]
    cos, _ = rotary_tables(torch.tensor([1, 3, 1]), frequencies)
    assert torch.equal(step.cos, cos)
    new = torch.tensor([7.0, 8.0, 9.0])[:, None, None].expand(3, 1, 8)
    found, values = cache.write(1, step.rows, step.positions, new, -new)
    assert found[:, :4, 0, 0].tolist() == [[6, 7, 0, 0], [3, 4, 5, 8], [6, 9, 0, 0]]
    assert torch.equal(values, -found)
