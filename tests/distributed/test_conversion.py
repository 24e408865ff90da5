"""Hugging Face to Megatron and back under every layout: bit-equal, each weight where it belongs."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.helpers.tiny_model import make_tiny_hf

VOCAB, DIVISOR = 131, 64  # Padded to 192 rows without tensor parallelism, to 256 over two ranks.
FAMILIES = ("llama", "mistral", "qwen2-tied", "qwen3")
LAYOUTS = {
    "tp1": {},
    "tp2": {"tensor": 2},
    "pp2": {"pipeline": 2},
    "tp2pp2": {"tensor": 2, "pipeline": 2},
    "pp2vpp2": {"pipeline": 2, "virtual": 2},
    "dp2": {"data": 2},
    "pp4": {"pipeline": 4},
    "pp2-uneven": {"pipeline": 2, "last_stage_layers": 1, "first_stage_layers": 3},
}
SIDE_FILES = {
    "tokenizer.json": b'{"version": "1.0"}\n',
    "tokenizer_config.json": b'{ "odd":   "spacing" }',
    "special_tokens_map.json": b"{}",
    "chat_template.jinja": b"{{ messages }}\r\n",
    "generation_config.json": b'{"eos_token_id": [7, 9]}',
}


@pytest.fixture(scope="module")
def hf_folders(tmp_path_factory):
    """A tiny random model of every family, biases and norms random too."""
    folders = {}
    for name in FAMILIES:
        family, _, tied = name.partition("-")
        folder = tmp_path_factory.mktemp(name)
        folders[name] = make_tiny_hf(folder, family, VOCAB, layers=4, tie=bool(tied))
        for file, content in SIDE_FILES.items():
            (folder / file).write_bytes(content)
    return folders


def world_size(layout):
    return layout.get("tensor", 1) * layout.get("pipeline", 1) * layout.get("data", 1)


def _open(layout, hf, dtype=torch.float32):
    from rl_megatron.models.families import read_shape, weight_rules
    from rl_megatron.models.gpt import build_model
    from rl_megatron.parallel.layout import Layout
    from rl_megatron.parallel.process import start_megatron

    process = start_megatron(Layout(**layout), seed=0)
    shape = read_shape(hf)
    return process, build_model(shape, process, dtype, DIVISOR), weight_rules(shape, DIVISOR)


def _poison(chunks):
    """What is not loaded must show."""
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data.fill_(float("nan"))


def import_job(layout, hf, root):
    from rl_megatron.checkpoint.folders import HF_SUBFOLDER
    from rl_megatron.checkpoint.hf_files import carry_hf_files
    from rl_megatron.checkpoint.hf_load import load_hf_weights
    from rl_megatron.checkpoint.megatron import save_megatron
    from rl_megatron.checkpoint.publish import new_checkpoint

    process, chunks, rules = _open(layout, hf)
    _poison(chunks)
    load_hf_weights(chunks, rules, hf, process)
    with new_checkpoint(root, 0, process) as folder:
        save_megatron(folder, chunks, process)
        if process.is_main:
            carry_hf_files(hf, folder / HF_SUBFOLDER)


def export_job(layout, root, output):
    from rl_megatron.checkpoint.folders import resolve_model_folder
    from rl_megatron.checkpoint.hf_save import iter_hf_weights, save_hf
    from rl_megatron.checkpoint.megatron import load_megatron

    found = resolve_model_folder(root)
    process, chunks, rules = _open(layout, found.hf)
    _poison(chunks)
    load_megatron(found.megatron, chunks)
    save_hf(output, iter_hf_weights(chunks, rules, process), found.hf, process)


def direct_job(layout, hf, output, max_file_bytes):
    """Load and save without a Megatron checkpoint; digests of what every rank was given."""
    from rl_megatron.checkpoint.hf_load import load_hf_weights
    from rl_megatron.checkpoint.hf_save import iter_hf_weights, save_hf

    process, chunks, rules = _open(layout, hf)
    _poison(chunks)
    load_hf_weights(chunks, rules, hf, process)
    save_hf(
        output,
        iter_hf_weights(chunks, rules, process),
        hf,
        process,
        max_file_bytes=max_file_bytes,
    )
    return [(name, float(t.double().sum())) for name, t in iter_hf_weights(chunks, rules, process)]


def assert_same_weights(output: Path, hf: Path) -> None:
    expected = load_file(hf / "model.safetensors")
    found = {}
    for file in sorted(output.glob("*.safetensors")):
        found |= load_file(file)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].equal(tensor), name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_hf_weights_come_back_bit_equal_from_every_layout(
    layout, family, hf_folders, pool, tmp_path
):
    hf, output = hf_folders[family], tmp_path / "out"
    digests = pool(world_size(LAYOUTS[layout])).run(direct_job, LAYOUTS[layout], hf, output, 20_000)
    assert_same_weights(output, hf)
    assert all(digest == digests[0] for digest in digests)
    names = [name for name, _ in digests[0]]
    assert names[0] == "model.embed_tokens.weight"
    layers = [int(name.split(".")[2]) for name in names if ".layers." in name]
    assert layers == sorted(layers)
    index = json.loads((output / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(load_file(hf / "model.safetensors"))
    assert AutoModelForCausalLM.from_pretrained(output).config.vocab_size == VOCAB


@pytest.mark.parametrize(
    ("family", "saved", "loaded"),
    [
        ("llama", "tp2", "tp1"),
        ("qwen3", "tp1", "tp2pp2"),
        ("qwen2-tied", "tp2", "pp4"),
        ("qwen2-tied", "pp2vpp2", "tp2"),
    ],
)
def test_ck_03_ck_09_a_checkpoint_is_exported_under_another_layout_and_without_its_source(
    family, saved, loaded, hf_folders, pool, tmp_path
):
    source = tmp_path / "source"
    shutil.copytree(hf_folders[family], source)
    root, output = tmp_path / "megatron", tmp_path / "out"
    pool(world_size(LAYOUTS[saved])).run(import_job, LAYOUTS[saved], source, root)
    source.rename(tmp_path / "moved_away")
    pool(world_size(LAYOUTS[loaded])).run(export_job, LAYOUTS[loaded], root, output)

    assert_same_weights(output, hf_folders[family])
    for file in (*SIDE_FILES, "config.json"):
        assert (output / file).read_bytes() == (hf_folders[family] / file).read_bytes()
    assert json.loads((output / "config.json").read_text())["vocab_size"] == VOCAB
    assert (root / "latest_checkpointed_iteration.txt").read_text() == "0\n"
    assert sorted(p.name for p in root.iterdir()) == [
        "iter_0000000",
        "latest_checkpointed_iteration.txt",
    ]


def holdings_job(layout, hf):
    """What a rank holds: its parameters' value in one corner by global name, and sizes."""
    from rl_megatron.checkpoint.hf_load import load_hf_weights
    from rl_megatron.checkpoint.naming import global_parameters

    process, chunks, rules = _open(layout, hf)
    load_hf_weights(chunks, rules, hf, process)
    held = global_parameters(chunks)
    return {name: parameter.detach().clone() for name, parameter in held.items()}


def test_ck_02_first_and_last_stage_hold_the_same_tied_embedding(hf_folders, pool):
    held = pool(4).run(holdings_job, LAYOUTS["pp4"], hf_folders["qwen2-tied"])
    first, last = held[0]["embedding.word_embeddings.weight"], held[3]["output_layer.weight"]
    assert first.equal(last)
    assert first[:VOCAB].any()
    for middle in held[1:3]:
        assert all(name.startswith("decoder.layers.") for name in middle)


@pytest.fixture(scope="module")
def deep_model(tmp_path_factory):
    """30 layers; every weight of layer l is filled with l."""
    folder = make_tiny_hf(tmp_path_factory.mktemp("deep"), "llama", VOCAB, layers=30)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".layers." in name:
                parameter.fill_(int(name.split(".")[2]))
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("layout", "sizes"),
    [
        ({"pipeline": 4, "last_stage_layers": 6}, [8, 8, 8, 6]),
        ({"pipeline": 4, "first_stage_layers": 10, "last_stage_layers": 6}, [10, 7, 7, 6]),
    ],
)
def test_ck_10_uneven_stages_hold_each_layer_once(layout, sizes, deep_model, pool, tmp_path):
    held = pool(4).run(holdings_job, layout, deep_model)
    start = 0
    for stage, size in zip(held, sizes, strict=True):
        in_layers = [name for name in stage if ".layers." in name]
        assert {int(n.split(".")[2]) for n in in_layers} == set(range(start, start + size))
        for name in in_layers:
            assert (stage[name] == int(name.split(".")[2])).all(), name
        start += size
    assert start == 30
    pool(4).run(direct_job, layout, deep_model, tmp_path / "out", 10**9)
    assert_same_weights(tmp_path / "out", deep_model)


def padding_job(layout, root):
    from rl_megatron.checkpoint.folders import resolve_model_folder
    from rl_megatron.checkpoint.megatron import load_megatron
    from rl_megatron.checkpoint.naming import global_parameters

    found = resolve_model_folder(root)
    _, chunks, _ = _open(layout, found.hf)
    _poison(chunks)
    load_megatron(found.megatron, chunks)
    held = global_parameters(chunks)
    return [held[n].detach().clone() for n in ("embedding.word_embeddings.weight",) if n in held]


@pytest.mark.parametrize(("saved", "loaded", "padded"), [("tp1", "tp2", 256), ("tp2", "tp1", 192)])
def test_ck_03_padded_rows_are_zero_under_another_padding(
    saved, loaded, padded, hf_folders, pool, tmp_path
):
    hf, root = hf_folders["llama"], tmp_path / "megatron"
    pool(world_size(LAYOUTS[saved])).run(import_job, LAYOUTS[saved], hf, root)
    shards = pool(world_size(LAYOUTS[loaded])).run(padding_job, LAYOUTS[loaded], root)
    table = torch.cat([shard for (shard,) in shards])
    assert table.shape[0] == padded
    assert table[:VOCAB].equal(load_file(hf / "model.safetensors")["model.embed_tokens.weight"])
    assert not table[VOCAB:].any()


def fit_job(root, other_hf):
    """The message when a checkpoint is loaded into another model."""
    from rl_megatron.checkpoint.folders import resolve_model_folder
    from rl_megatron.checkpoint.megatron import load_megatron
    from rl_megatron.errors import CheckpointError

    _, chunks, _ = _open({}, other_hf)
    try:
        load_megatron(resolve_model_folder(root).megatron, chunks)
    except CheckpointError as error:
        return str(error)
    return "loaded"


def test_a_checkpoint_of_another_model_is_refused(hf_folders, pool, tmp_path):
    root = tmp_path / "megatron"
    pool(1).run(import_job, {}, hf_folders["llama"], root)
    for other in ("qwen2-tied", "qwen3"):
        (message,) = pool(1).run(fit_job, root, hf_folders[other])
        assert "does not fit the model" in message
        assert str(root) in message
    deep = make_tiny_hf(tmp_path / "deep", "llama", VOCAB, layers=5)
    (message,) = pool(1).run(fit_job, root, deep)
    assert "does not fit the model" in message
