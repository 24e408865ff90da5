"""The cache of reference log-probs: what goes in comes out by content, and damage is named."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from rl_megatron.checkpoint.ref_cache import (
    Fingerprint,
    RefCache,
    RefCacheWriter,
    make_fingerprint,
    read_manifest,
)
from rl_megatron.checkpoint.ref_cache.index import MISSING, Index
from rl_megatron.checkpoint.ref_cache.rows import sortable
from rl_megatron.checkpoint.ref_cache.shard import Rows
from rl_megatron.errors import CheckpointError
from rl_megatron.interfaces.batch import PackedBatch
from rl_megatron.models.shape import ModelShape, RopeSettings
from rl_megatron.parallel.layout import Layout
from rl_megatron.parallel.process import Process

ALONE = Process(Layout(), 0, torch.device("cpu"))
FINGERPRINT = Fingerprint({"weights": "ab", "dtype": "float32"})


def rows(masks, start=0):
    """One sequence per mask; tokens are numbered from `start`."""
    flat = [bool(m) for mask in masks for m in mask]
    return PackedBatch(
        tokens=torch.arange(start, start + len(flat)),
        cu_seqlens=torch.tensor([0, *map(len, masks)]).cumsum(0),
        response_mask=torch.tensor(flat, dtype=torch.bool),
        sequence_ids=torch.arange(len(masks)),
    )


def random_rows(count=20, seed=0):
    generator = random.Random(seed)
    masks = []
    for index in range(count):
        response = 0 if index == 3 else generator.randint(1, 6)
        masks.append([0] * generator.randint(1, 4) + [1] * response)
    return rows(masks, start=1000 * seed)


def values(batch):
    """A log-prob that follows from the token alone."""
    return torch.where(batch.response_mask, -1.5 * batch.tokens - 0.1, 0.0).float()


def build(folder, *batches, fingerprint=FINGERPRINT, publish=True):
    writer = RefCacheWriter(folder, fingerprint, ALONE)
    for batch in batches:
        missing = writer.missing(batch)
        if missing:
            part = batch.select(missing)
            writer.add(part, values(part))
    if publish:
        writer.publish({"model": "m"})
    else:
        writer._thread.shutdown()


def open_cache(folder, fingerprint=FINGERPRINT):
    return RefCache.open(folder, fingerprint, ALONE)


def shards(folder):
    return sorted(folder.glob("ref-*.safetensors"))


def test_dpo_02_a_row_is_found_whatever_its_place(tmp_path):
    batch = random_rows()
    build(tmp_path, batch.select(range(8)), batch.select(range(8, 20)))
    cache = open_cache(tmp_path)
    assert cache.manifest.num_rows == 20
    assert cache.manifest.num_tokens == int(batch.response_mask.sum())
    for seed in range(3):
        order = list(range(20))
        random.Random(seed).shuffle(order)
        shuffled = batch.select(order)
        assert torch.equal(cache.logprobs(shuffled), values(shuffled))
    alone = batch.select([3])
    assert not alone.response_mask.any() and torch.equal(cache.logprobs(alone), values(alone))


def test_dpo_02_no_random_number_is_drawn(tmp_path):
    # Not Python's own: under pytest the checks of shapes draw from them.
    batch = random_rows()
    states = torch.get_rng_state(), np.random.get_state()[1].copy()
    build(tmp_path, batch)
    open_cache(tmp_path).logprobs(batch)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.array_equal(np.random.get_state()[1], states[1])


def test_equal_rows_are_kept_once(tmp_path):
    one = rows([[0, 1, 1]])
    twice = PackedBatch(
        tokens=one.tokens.repeat(2),
        cu_seqlens=torch.tensor([0, 3, 6]),
        response_mask=one.response_mask.repeat(2),
        sequence_ids=torch.arange(2),
    )
    build(tmp_path, twice, one)
    cache = open_cache(tmp_path)
    assert cache.manifest.num_rows == 1
    assert torch.equal(cache.logprobs(twice), values(twice))


def test_rows_whose_keys_agree_in_their_first_half_are_told_apart():
    keys = np.frombuffer(b"same....one....." + b"same....two.....", dtype=np.uint8).reshape(2, 16)
    shard = Rows(keys, np.array([0, 1, 2]), np.zeros(2, dtype=np.float32))
    index = Index(sortable(keys), np.array([[0, 0], [0, 1]], dtype=np.int32))
    third = np.frombuffer(b"same....three...", dtype=np.uint8).reshape(1, 16)
    found = index.find(np.concatenate([keys[::-1], third]), [shard])
    assert found.tolist() == [[0, 1], [0, 0], [MISSING, MISSING]]


def test_dpo_03_a_changed_token_or_mask_is_another_row(tmp_path):
    batch = rows([[0, 1, 1], [0, 0, 1]])
    build(tmp_path, batch)
    cache = open_cache(tmp_path)
    other_token = batch.with_fields(tokens=batch.tokens + torch.tensor([0, 0, 1, 0, 0, 0]))
    other_mask = batch.with_fields(response_mask=torch.tensor([0, 1, 1, 0, 1, 1]).bool())
    assert cache.missing(batch) == []
    assert cache.missing(other_token) == [0]
    assert cache.missing(other_mask) == [1]
    with pytest.raises(CheckpointError, match="1 of 2 rows .* the first being row 1.*build_cache"):
        cache.logprobs(other_mask)


def test_a_build_that_was_killed_keeps_its_shards(tmp_path):
    batch = random_rows()
    build(tmp_path, batch.select(range(5)), publish=False)
    (tmp_path / ".ref-0.safetensors.1.tmp").write_bytes(b"half a sha")
    assert read_manifest(tmp_path) is None
    writer = RefCacheWriter(tmp_path, FINGERPRINT, ALONE)
    assert writer.missing(batch) == list(range(5, 20))
    build(tmp_path, batch)
    assert torch.equal(open_cache(tmp_path).logprobs(batch), values(batch))
    assert len(shards(tmp_path)) == 2


def test_new_rows_are_added_to_the_old_ones(tmp_path):
    first, second = random_rows(seed=1), random_rows(seed=2)
    build(tmp_path, first)
    before = [path.read_bytes() for path in shards(tmp_path)]
    build(tmp_path, first, second)
    assert before[0] in [path.read_bytes() for path in shards(tmp_path)]
    cache = open_cache(tmp_path)
    for batch in (first, second):
        assert torch.equal(cache.logprobs(batch), values(batch))


def truncate(path):
    path.write_bytes(path.read_bytes()[:-7])


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)


def remove(path):
    path.unlink()


def replace_by_another(path):
    other = path.parent.parent / "other"
    build(other, random_rows(seed=7), fingerprint=Fingerprint({"weights": "cd"}))
    path.write_bytes(shards(other)[0].read_bytes())


def replace_by_one_of_this_cache(path):
    other = path.parent.parent / "more"
    build(other, random_rows(seed=7))
    path.write_bytes(shards(other)[0].read_bytes())


DAMAGES = [truncate, flip_a_bit, remove, replace_by_another, replace_by_one_of_this_cache]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_shard_is_named_and_refused_and_built_again(damage, tmp_path):
    folder = tmp_path / "cache"
    batch = random_rows()
    build(folder, batch.select(range(10)), batch.select(range(10, 20)))
    victim = shards(folder)[1]
    damage(victim)
    with pytest.raises(CheckpointError, match=rf"{victim}.*tools/ref_cache.py build"):
        open_cache(folder)
    build(folder, batch)
    assert torch.equal(open_cache(folder).logprobs(batch), values(batch))


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, remove])
def test_a_damaged_index_is_named_and_made_again(damage, tmp_path):
    batch = random_rows()
    build(tmp_path, batch)
    index = tmp_path / read_manifest(tmp_path).index
    damage(index)
    with pytest.raises(CheckpointError, match=rf"{index}.*tools/ref_cache.py build"):
        open_cache(tmp_path)
    build(tmp_path, batch)
    assert torch.equal(open_cache(tmp_path).logprobs(batch), values(batch))


@pytest.mark.parametrize("text", ["{", "[]", '{"shards": []}'])
def test_a_broken_manifest_is_named(text, tmp_path):
    build(tmp_path, random_rows())
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match="manifest.json"):
        open_cache(tmp_path)


def test_no_cache_at_all(tmp_path):
    with pytest.raises(CheckpointError, match="no reference cache in .*ref_cache.py build"):
        open_cache(tmp_path)


SHAPE = ModelShape(
    family="llama",
    num_layers=2,
    hidden_size=8,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=4,
    intermediate_size=16,
    vocab_size=10,
    norm_eps=1e-6,
    rope=RopeSettings(theta=1e4),
    qkv_bias=False,
    qk_norm=False,
    tie_word_embeddings=False,
    max_position_embeddings=128,
    initializer_range=0.02,
)
CHANGES = {
    "weights": ({"weights_digest": "cd"}, "weights: 'ab' -> 'cd'"),
    "dtype": ({"dtype": "bfloat16"}, "dtype: 'float32' -> 'bfloat16'"),
    "temperature": ({"temperature": 0.7}, "temperature: 1.0 -> 0.7"),
    "rotation": (
        {"shape": {"rope": RopeSettings(theta=5e5)}},
        "model.rope.theta: 10000.0 -> 500000.0",
    ),
    "norm": ({"shape": {"norm_eps": 1e-5}}, "model.norm_eps: 1e-06 -> 1e-05"),
}


def fingerprint(weights_digest="ab", shape=None, dtype="float32", temperature=1.0):
    return make_fingerprint(weights_digest, replace(SHAPE, **(shape or {})), dtype, temperature)


@pytest.mark.parametrize("change", CHANGES)
def test_dpo_03_whatever_changes_a_number_is_named(change, tmp_path):
    settings, text = CHANGES[change]
    build(tmp_path, random_rows(), fingerprint=fingerprint())
    with pytest.raises(CheckpointError) as error:
        open_cache(tmp_path, fingerprint(**settings))
    assert f"made for something else, and is not used: {text}. Name another" in str(error.value)
    assert fingerprint(**settings).id != fingerprint().id


def test_what_changes_no_number_changes_no_fingerprint():
    other = fingerprint(shape={"max_position_embeddings": 9, "initializer_range": 1.0})
    assert other.differences(fingerprint()) == [] and other.id == fingerprint().id


def test_shards_of_another_model_are_never_published(tmp_path):
    build(tmp_path, random_rows(seed=1), fingerprint=Fingerprint({"weights": "cd"}), publish=False)
    build(tmp_path, random_rows(seed=2))
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert [shard["rows"] for shard in manifest["shards"]] == [20]
    assert len(list(tmp_path.glob("*.bad"))) == 1


def test_bytes_per_token_of_long_responses(tmp_path):
    batch = rows([[0, *[1] * 400]] * 200)
    build(tmp_path, batch.with_fields(tokens=torch.arange(batch.num_tokens)))
    files = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert files <= 4.2 * int(batch.response_mask.sum())
