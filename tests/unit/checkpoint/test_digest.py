"""The weights digest against plain integers, and what must and must not change it."""

import json
import shutil
from hashlib import blake2b

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl_megatron.checkpoint import digest
from rl_megatron.checkpoint.digest import folder_digest, tensors_digest
from rl_megatron.models.transformers_model import load_transformers_model, named_weights
from tests.helpers.tiny_model import make_tiny_hf

MASK = 2**64 - 1


def number(text, lane, counter):
    """SplitMix64 in plain integers."""
    key = int.from_bytes(blake2b(f"{lane} {text}".encode(), digest_size=8).digest(), "little")
    x = (key + counter * 0x9E3779B97F4A7C15) & MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def plain_digest(weights):
    """The definition, element by element."""
    lanes = []
    for lane in (0, 1):
        total = 0
        for name, tensor in weights.items():
            key = f"{lane} {name} {list(tensor.shape)}".encode()
            total += int.from_bytes(blake2b(key, digest_size=8).digest(), "little")
            bits = tensor.float().reshape(tensor.shape[0], -1).view(torch.int32).tolist()
            for i, row in enumerate(bits):
                for j, value in enumerate(row):
                    value %= 2**32
                    mixed = value ^ value >> 16
                    total += (number(name, lane, i) | 1) * number("columns", lane, j) * mixed
        lanes.append(total & MASK)
    return "".join(f"{lane:016x}" for lane in lanes)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_digest_is_the_sum_that_it_says(dtype, compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(digest, "_library", lambda: None)
    assert (digest._library() is not None) == compiled
    generator = torch.Generator().manual_seed(0)
    weights = {
        "a.weight": torch.randn(7, 5, generator=generator).to(dtype),
        "b.bias": torch.randn(6, generator=generator).to(dtype),
        "c.weight": torch.tensor([[0.0, -0.0, float("inf")], [1.0, -1.0, 1e-5]]).to(dtype),
    }
    assert tensors_digest(weights.items()) == plain_digest(weights)


def test_blocks_do_not_show():
    # Longer than a block of the compiled kernel, and than one of torch's.
    wide = {"w": torch.randn(2, 5_000, generator=torch.Generator().manual_seed(0))}
    assert tensors_digest(wide.items()) == plain_digest(wide)


def test_a_view_has_the_digest_of_its_copy():
    large = torch.randn(50, 3_000, generator=torch.Generator().manual_seed(0))
    view = large[3:40, 5:2_000]
    assert tensors_digest([("w", view)]) == tensors_digest([("w", view.clone())])


def test_torch_and_the_compiled_kernel_agree(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        weights = [("w", torch.randn(700, 900, generator=generator).to(dtype))]
        fast = tensors_digest(weights)
        with monkeypatch.context() as patch:
            patch.setattr(digest, "_library", lambda: None)
            assert tensors_digest(weights) == fast


@pytest.fixture
def folder(tmp_path):
    return make_tiny_hf(tmp_path / "model", "llama", 37, layers=2, tie=False)


def edit(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def swap_layers(weights):
    first, second = (f"model.layers.{i}.mlp.up_proj.weight" for i in (0, 1))
    weights[first], weights[second] = weights[second], weights[first].clone()


def swap_rows(weights):
    weights["lm_head.weight"][[3, 8]] = weights["lm_head.weight"][[8, 3]]


def swap_columns(weights):
    weights["lm_head.weight"][:, [0, 1]] = weights["lm_head.weight"][:, [1, 0]]


def one_bit(weights):
    weights["model.norm.weight"].view(torch.int32)[5] ^= 1


def sign_of_zero(weights):
    weights["model.norm.weight"][0] = -0.0


@pytest.mark.parametrize("change", [swap_layers, swap_rows, swap_columns, one_bit, sign_of_zero])
def test_whatever_changes_the_model_changes_both_halves(folder, change):
    if change is sign_of_zero:
        edit(
            folder, lambda weights: weights["model.norm.weight"].index_fill_(0, torch.tensor(0), 0)
        )
    before = folder_digest(folder)
    edit(folder, change)
    after = folder_digest(folder)
    assert before[:16] != after[:16] and before[16:] != after[16:]


def test_a_missing_tensor_shows_even_if_it_is_zero():
    zero = {"a": torch.zeros(2, 3), "b": torch.ones(4)}
    assert tensors_digest(zero.items()) != tensors_digest([("b", zero["b"])])


def test_how_it_is_stored_does_not_show(folder, tmp_path):
    before = folder_digest(folder)
    weights = load_file(folder / "model.safetensors")
    shutil.copytree(folder, tmp_path / "split")
    (tmp_path / "split" / "model.safetensors").unlink()
    files = {"1.safetensors": sorted(weights)[::2], "2.safetensors": sorted(weights)[1::2]}
    for file, names in files.items():
        save_file({name: weights[name] for name in names}, tmp_path / "split" / file)
    index = {"weight_map": {name: file for file, names in files.items() for name in names}}
    (tmp_path / "split" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert folder_digest(tmp_path / "split") == before


def test_float32_values_that_bfloat16_holds_have_one_digest(folder, tmp_path):
    edit(folder, lambda weights: weights.update({n: w.bfloat16() for n, w in weights.items()}))
    narrow = folder_digest(folder)
    edit(folder, lambda weights: weights.update({n: w.float() for n, w in weights.items()}))
    assert folder_digest(folder) == narrow


def test_a_tied_head_counts_once(tmp_path):
    folder = make_tiny_hf(tmp_path / "tied", "qwen2", 37, layers=1, tie=True)
    before = folder_digest(folder)
    edit(
        folder,
        lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()}),
    )
    assert folder_digest(folder) == before


def test_a_transformers_model_has_the_digest_of_its_files(folder):
    model = load_transformers_model(folder, torch.float32, torch.device("cpu"))
    assert tensors_digest(named_weights(model)) == folder_digest(folder)
