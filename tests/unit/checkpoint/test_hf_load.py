"""Loading: every tensor used, every parameter filled, and a message for what does not fit."""

import json

import pytest
import torch
from safetensors.torch import save_file

from rl_megatron.checkpoint.hf_load import load_hf_weights
from rl_megatron.checkpoint.hf_save import iter_hf_weights
from rl_megatron.errors import CheckpointError
from rl_megatron.models.families import FAMILIES, weight_rules
from rl_megatron.parallel.layout import Layout
from rl_megatron.parallel.process import Process
from tests.helpers.bare_model import BareChunk

ALONE = Process(layout=Layout(), rank=0, device=torch.device("cpu"))
CONFIG = {
    "model_type": "qwen2",
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 10,
    "max_position_embeddings": 16,
}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def setup(tied=False):
    shape = FAMILIES["qwen2"].shape(CONFIG | {"tie_word_embeddings": tied})
    rules = weight_rules(shape, 16)
    torch.manual_seed(0)
    tensors = {
        name: torch.randn(size)
        for rule in rules
        for name, size in zip(rule.hf_names, rule.split.hf_shapes, strict=True)
    }
    return rules, tensors


def load(rules, folder):
    chunk = BareChunk(rules, range(2))
    load_hf_weights([chunk], rules, folder, ALONE)
    return chunk


def write(tensors, folder):
    save_file(tensors, folder / "model.safetensors")


def test_every_parameter_is_filled_and_comes_back(tmp_path):
    rules, tensors = setup()
    write(tensors, tmp_path)
    back = dict(iter_hf_weights([load(rules, tmp_path)], rules, ALONE))
    assert list(back) == [name for rule in rules for name in rule.hf_names]
    assert all(back[name].equal(tensor) for name, tensor in tensors.items())


def test_weights_are_cast_to_the_dtype_of_the_model(tmp_path):
    rules, tensors = setup()
    write(tensors, tmp_path)
    chunk = BareChunk(rules, range(2)).to(torch.bfloat16)
    load_hf_weights([chunk], rules, tmp_path, ALONE)
    for name, tensor in iter_hf_weights([chunk], rules, ALONE):
        assert tensor.equal(tensors[name].to(torch.bfloat16))


def test_several_files_and_old_inverse_frequencies(tmp_path):
    rules, tensors = setup()
    old = "model.layers.0.self_attn.rotary_emb.inv_freq"
    weight_map = {}
    for number, names in enumerate((sorted(tensors)[:9], sorted(tensors)[9:])):
        part = {name: tensors[name] for name in names} | ({old: torch.ones(1)} if number else {})
        save_file(part, tmp_path / f"part{number}.safetensors")
        weight_map |= dict.fromkeys(part, f"part{number}.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    back = dict(iter_hf_weights([load(rules, tmp_path)], rules, ALONE))
    assert all(back[name].equal(tensor) for name, tensor in tensors.items())

    (tmp_path / "part1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks part1\.safetensors"):
        load(rules, tmp_path)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(weight_map, "part0.safetensors")}))
    with pytest.raises(CheckpointError, match=r"places .* in part0\.safetensors"):
        load(rules, tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model.norm.weight": None}, ["lacks model.norm.weight"]),
        ({HEAD: None}, ["lacks lm_head.weight", "tie_word_embeddings false"]),
        ({"model.layers.1.self_attn.o_proj.bias": torch.zeros(8)}, ["o_proj.bias", "no place"]),
        ({"model.norm.weight": torch.zeros(9)}, ["model.norm.weight", "[9]", "[8]"]),
        ({EMBEDDING: torch.zeros(11, 8)}, [EMBEDDING, "[11, 8]", "[10, 8]"]),
        ({"model.norm.weight": torch.zeros(8, dtype=torch.int8)}, ["model.norm.weight", "I8"]),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(change, words, tmp_path):
    rules, tensors = setup()
    write({k: v for k, v in (tensors | change).items() if v is not None}, tmp_path)
    with pytest.raises(CheckpointError) as error:
        load(rules, tmp_path)
    for word in [str(tmp_path), *words]:
        assert word in str(error.value)


def test_a_cut_off_file_and_an_empty_folder_are_named(tmp_path):
    rules, tensors = setup()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        load(rules, tmp_path)
    write(tensors, tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a complete"):
        load(rules, tmp_path)


def test_ck_02_a_tied_model_may_come_with_its_head_if_that_is_the_embedding(tmp_path):
    rules, tensors = setup(tied=True)
    assert HEAD not in tensors
    write(tensors, tmp_path)
    load(rules, tmp_path)
    write(tensors | {HEAD: tensors[EMBEDDING].clone()}, tmp_path)
    load(rules, tmp_path)
    write(tensors | {HEAD: tensors[EMBEDDING] + 1}, tmp_path)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs"):
        load(rules, tmp_path)


def test_a_model_that_does_not_match_its_table_is_refused(tmp_path):
    rules, tensors = setup()
    write(tensors, tmp_path)
    with pytest.raises(CheckpointError, match=r"without a parameter .*decoder\.layers\.1"):
        load_hf_weights([BareChunk(rules, [0])], rules, tmp_path, ALONE)
    chunk = BareChunk(rules, range(2))
    chunk.extra = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(CheckpointError, match=r"without a rule \['extra'\]"):
        load_hf_weights([chunk], rules, tmp_path, ALONE)
    wide = weight_rules(FAMILIES["qwen2"].shape(CONFIG), 32)
    with pytest.raises(CheckpointError, match=r"make_vocab_size_divisible_by"):
        load_hf_weights([BareChunk(wide, range(2))], rules, tmp_path, ALONE)
