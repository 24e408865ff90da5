"""Ranks write their shares of a Hugging Face model's weights."""

from dataclasses import replace

import pytest
import torch

from rl_megatron.checkpoint.digest import folder_digest, tensors_digest
from rl_megatron.checkpoint.hf_files import HFWeights
from rl_megatron.checkpoint.hf_shards import WrittenShards
from rl_megatron.parallel.layout import Layout
from rl_megatron.parallel.process import Process

WEIGHTS = {
    "embedding": torch.randn(50, 8),
    "up": torch.randn(16, 8),
    "gate": torch.randn(16, 8).bfloat16(),
    "half of a tensor": torch.randn(16, 8)[:, ::2],
    "norm": torch.randn(8),
}


def save(folder, ranks):
    alone = Process(Layout(data=ranks), 0, torch.device("cpu"))
    parts = [
        WrittenShards(folder, iter(WEIGHTS.items()), replace(alone, rank=rank))
        for rank in range(ranks)
    ]
    for part in parts:
        part.write()
    for part in parts:
        part.finish(None)


def read(folder):
    with HFWeights(folder) as files:
        return {name: files.read(name, (slice(None),)) for name in files.names}


def test_what_one_and_what_several_ranks_write_is_the_same(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    save(tmp_path, 1)
    assert {path.name for path in tmp_path.glob("model*")} == {"model.safetensors"}
    digests = {folder_digest(tmp_path)}
    for ranks in (2, 7):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        save(folder, ranks)
        digests.add(folder_digest(folder))
        found = read(folder)
        assert found.keys() == WEIGHTS.keys()
        assert [n for n, w in WEIGHTS.items() if not torch.equal(found[n], w)] == []
        assert {n for n, w in WEIGHTS.items() if found[n].dtype != w.dtype} == set()
    assert digests == {tensors_digest(WEIGHTS.items())}


def test_shares_are_even_in_bytes(tmp_path):
    save(tmp_path, 2)
    sizes = [path.stat().st_size for path in sorted(tmp_path.glob("*.safetensors"))]
    whole = sum(weight.nbytes for weight in WEIGHTS.values())
    largest = max(weight.nbytes for weight in WEIGHTS.values())
    assert len(sizes) == 2 and max(sizes) - min(sizes) <= largest < whole
    assert all(path.stat().st_mode & 0o044 for path in tmp_path.glob("*.safetensors"))


def test_a_rank_that_cannot_write_says_where(tmp_path):
    alone = Process(Layout(), 0, torch.device("cpu"))
    part = WrittenShards(tmp_path / "gone", iter(WEIGHTS.items()), alone)
    with pytest.raises(OSError, match="gone/model.safetensors"):
        part.write()
