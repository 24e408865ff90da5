"""Saving: dtypes, names, files and side files as they were in the source."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl_megatron.checkpoint.hf_files import (
    SIDE_FILES,
    TensorRecord,
    carry_hf_files,
    lossless_dtype,
    read_records,
)
from rl_megatron.checkpoint.hf_save import save_hf
from rl_megatron.errors import CheckpointError
from rl_megatron.parallel.layout import Layout
from rl_megatron.parallel.process import Process

ALONE = Process(layout=Layout(), rank=0, device=torch.device("cpu"))
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
BIAS = "router.bias"


def make_source(folder, tensors, **config):
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def weights(tensors):
    return iter(tensors.items())


def loaded(folder):
    found = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def test_ck_07_a_tensor_that_was_fp32_stays_fp32_through_two_exports(tmp_path):
    bias = torch.tensor([0.1234567])
    tensors = {BIAS: bias, "w": torch.randn(4, 4).to(torch.bfloat16)}
    source = make_source(tmp_path / "source", tensors, dtype="bfloat16")
    held = lossless_dtype(read_records(source).values())
    assert held == torch.float32

    in_model = {name: tensor.to(held) for name, tensor in tensors.items()}
    save_hf(tmp_path / "first", weights(in_model), source, ALONE)
    again = {name: tensor.to(held) for name, tensor in loaded(tmp_path / "first").items()}
    save_hf(tmp_path / "second", weights(again), tmp_path / "first", ALONE)

    first = loaded(tmp_path / "first")
    assert first[BIAS].dtype == torch.float32
    assert first[BIAS].item() == 0.12345670163631439
    assert first["w"].equal(tensors["w"])
    assert json.loads((tmp_path / "first" / "config.json").read_text())["dtype"] == "bfloat16"
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "first" / file).read_bytes() == (tmp_path / "second" / file).read_bytes()


def test_lossless_dtype_is_bfloat16_only_if_all_are():
    def records(dtypes):
        return [TensorRecord(dtype, (1,)) for dtype in dtypes]

    assert lossless_dtype(records([torch.bfloat16, torch.bfloat16])) == torch.bfloat16
    for other in (torch.float16, torch.float32):
        assert lossless_dtype(records([torch.bfloat16, other])) == torch.float32


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_another_dtype_is_said_in_the_config_and_changes_nothing_else_there(key, tmp_path):
    tensors = {"w": torch.randn(4, 4)}
    config = {"vocab_size": 10, key: "float32", "last": [1]}
    source = make_source(tmp_path / "source", tensors, **config)
    save_hf(tmp_path / "out", weights(tensors), source, ALONE, dtype=torch.bfloat16)
    assert loaded(tmp_path / "out")["w"].equal(tensors["w"].to(torch.bfloat16))
    found = json.loads((tmp_path / "out" / "config.json").read_text())
    assert list(found.items()) == list((config | {key: "bfloat16"}).items())


@pytest.mark.parametrize("has_head", [False, True])
def test_ck_02_a_tied_head_is_exported_only_if_the_source_had_it(has_head, tmp_path):
    table = torch.randn(3, 2)
    tensors = {EMBEDDING: table} | ({HEAD: table.clone()} if has_head else {})
    source = make_source(tmp_path / "source", tensors, tie_word_embeddings=True)
    trained = table + 1
    save_hf(tmp_path / "out", weights({EMBEDDING: trained}), source, ALONE)
    found = loaded(tmp_path / "out")
    assert found.keys() == tensors.keys()
    assert all(tensor.equal(trained) for tensor in found.values())


def test_files_are_cut_by_size_and_found_through_the_index(tmp_path):
    tensors = {f"w{i}": torch.full((4,), float(i)) for i in range(5)}
    source = make_source(tmp_path / "source", tensors)
    save_hf(tmp_path / "out", weights(tensors), source, ALONE, max_file_bytes=40)
    names = [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(
        [*names, "config.json", "model.safetensors.index.json"]
    )
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 5 * 16
    assert [index["weight_map"][f"w{i}"] for i in range(5)] == [
        names[0],
        names[0],
        names[1],
        names[1],
        names[2],
    ]
    assert {name: tensor.tolist() for name, tensor in loaded(tmp_path / "out").items()} == {
        name: tensor.tolist() for name, tensor in tensors.items()
    }


def test_ck_09_side_files_survive_the_loss_of_their_source_byte_by_byte(tmp_path):
    source = make_source(tmp_path / "source", {"w": torch.zeros(1, dtype=torch.float16)})
    for name in SIDE_FILES:
        (source / name).write_bytes(b'{"eos_token_id":  [7, 9]}\r\n' + name.encode() * 2)
    (source / "config.json").write_text("{}")
    (source / "README.md").write_text("not carried")
    expected = {name: (source / name).read_bytes() for name in SIDE_FILES}
    carry_hf_files(source, tmp_path / "first")
    source.rename(tmp_path / "moved")
    carry_hf_files(tmp_path / "first", tmp_path / "second")
    assert read_records(tmp_path / "second") == read_records(tmp_path / "moved")

    held = {"w": torch.zeros(1)}
    save_hf(tmp_path / "out", weights(held), tmp_path / "second", ALONE)
    assert loaded(tmp_path / "out")["w"].dtype == torch.float16
    found = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    del found["model.safetensors"]
    assert found == expected


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"w": torch.zeros(3)}, ["w of shape [3]", "[2]"]),
        ({"x": torch.zeros(2)}, ["x of shape [2]", "no such tensor"]),
        ({"w": None}, ["lacks: ['w']"]),
    ],
)
def test_weights_of_another_model_are_refused_and_nothing_is_left(change, words, tmp_path):
    tensors = {"v": torch.zeros(2), "w": torch.zeros(2)}
    source = make_source(tmp_path / "source", tensors)
    given = {k: v for k, v in (tensors | change).items() if v is not None}
    with pytest.raises(CheckpointError) as error:
        save_hf(tmp_path / "out", weights(given), source, ALONE)
    for word in [str(source), *words]:
        assert word in str(error.value)
    assert not (tmp_path / "out").exists()
