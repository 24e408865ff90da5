"""A cache built under one layout serves another: the same log-probs and steps as without."""

from pathlib import Path

import pytest
import torch

from rl_megatron.checkpoint.ref_cache import Fingerprint, RefCache, RefCacheWriter
from rl_megatron.data.packing import MicroBatching
from rl_megatron.losses import dpo_objective
from tests.helpers.backend_contract import OPTIMIZER, make_batch
from tests.helpers.megatron_job import make_backend, start
from tests.helpers.tiny_model import make_tiny_hf

SIZES = {"tp1": 1, "dp2": 2, "tp2": 2, "pp2": 2, "dp4": 4}
FINGERPRINT = Fingerprint({"weights": "of this test"})
PAIRS = 12
# Two passes over the pairs, in different orders, four pairs a step.
STEPS = [[3, 0, 4, 1], [2, 7, 9, 5], [11, 6, 8, 10], [1, 5, 9, 0], [10, 2, 8, 6], [7, 11, 3, 4]]


def pairs(numbers):
    return [side for pair in numbers for side in (2 * pair, 2 * pair + 1)]


def build_job(layout, folder, batch, cache, chunk):
    """Build the cache, `chunk` sequences at a time; the log-probs as the model gives them."""
    process = start(layout)
    backend = make_backend(folder, process, MicroBatching(micro_batch_size=2), None)
    writer = RefCacheWriter(cache, FINGERPRINT, process)
    found = torch.zeros(batch.num_tokens)
    for first in range(0, batch.num_sequences, chunk):
        members = range(first, min(first + chunk, batch.num_sequences))
        part = batch.select(members).with_fields(paired=False)
        assert writer.missing(part) == list(range(len(members)))
        logprobs = backend.logprobs(part)
        found[batch.token_index(members)] = logprobs
        writer.add(part, logprobs)
    writer.publish({})
    return found


def read_job(layout, batch, cache):
    return RefCache.open(cache, FINGERPRINT, start(layout)).logprobs(batch)


def train_job(layout, folder, batch, cache):
    """Metrics of every step, with log-probs from the cache, or from a reference if it is None."""
    process = start(layout)
    policy = make_backend(folder, process, MicroBatching(micro_batch_size=1), OPTIMIZER)
    reference = (
        make_backend(folder, process, MicroBatching(micro_batch_size=1), None)
        if cache is None
        else RefCache.open(cache, FINGERPRINT, process)
    )
    metrics = []
    for numbers in STEPS:
        part = batch.select(pairs(numbers))
        part = part.with_fields(ref_logprobs=reference.logprobs(part))
        metrics.append(policy.train_step(part, dpo_objective(beta=0.5), lr=1e-3))
    return metrics


def race_job(cache):
    """Rank 1 looked before the other job published: what each rank opens."""
    from rl_megatron.checkpoint.ref_cache import manifest

    process = start("dp2")
    seen = manifest.read_manifest
    manifest.read_manifest = seen if process.is_main else lambda folder: None
    try:
        return RefCache.open(cache, FINGERPRINT, process).manifest
    finally:
        manifest.read_manifest = seen


def broken_job(cache, batch):
    """What each rank hears of a manifest that rank 0 cannot read, and of one it cannot write."""
    from rl_megatron.checkpoint.ref_cache import writer as writers
    from rl_megatron.errors import CheckpointError

    process = start("dp2")
    heard = []
    try:
        RefCache.open(cache, FINGERPRINT, process)
    except CheckpointError as error:
        heard.append(str(error))

    def full(*_):
        raise OSError("no space left")

    writer = RefCacheWriter(cache.parent / "full", FINGERPRINT, process)
    writer.add(batch, torch.zeros(batch.num_tokens))
    write_manifest, writers.write_manifest = writers.write_manifest, full
    try:
        writer.publish({})
    except CheckpointError as error:
        heard.append(str(error))
    finally:
        writers.write_manifest = write_manifest
    return heard


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_hf(tmp_path_factory.mktemp("qwen3"), "qwen3", layers=2, width=0.15)


@pytest.fixture(scope="module")
def batch():
    return make_batch(2 * PAIRS, paired=True)


@pytest.fixture(scope="module")
def built(pool, folder, batch, tmp_path_factory):
    """By layout: the cache, and what the model said."""

    def build(layout):
        if layout not in made:
            cache = Path(tmp_path_factory.mktemp(layout)) / "cache"
            found = pool(SIZES[layout]).run(build_job, layout, folder, batch, cache, 5)
            made[layout] = cache, found[0]
        return made[layout]

    made = {}
    return build


@pytest.mark.parametrize(("written", "read"), [("tp1", "dp4"), ("dp2", "tp1"), ("dp4", "pp2")])
def test_dpo_02_what_is_read_is_what_was_computed(pool, batch, built, written, read):
    cache, computed = built(written)
    for found in pool(SIZES[read]).run(read_job, read, batch, cache):
        assert torch.equal(found, computed)
    # Every data-parallel rank has written.
    shards = list(cache.glob("ref-*.safetensors"))
    assert len(shards) == 5


@pytest.mark.parametrize("layout", ["dp2", "tp2", "pp2", "dp4"])
def test_layouts_compute_the_same(built, layout):
    torch.testing.assert_close(built(layout)[1], built("tp1")[1], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("written", "layout"), [("tp1", "tp1"), ("dp2", "dp2"), ("dp4", "tp2"), ("tp1", "pp2")]
)
def test_dpo_02_a_run_is_the_same_with_and_without_the_cache(
    pool, folder, batch, built, written, layout
):
    cached = pool(SIZES[layout]).run(train_job, layout, folder, batch, built(written)[0])[0]
    plain = pool(SIZES[layout]).run(train_job, layout, folder, batch, None)[0]
    assert len(cached) == len(plain) == len(STEPS)
    for found, expected in zip(cached, plain, strict=True):
        assert found["loss/total"] == pytest.approx(expected["loss/total"], abs=1e-6)
        for name, value in expected.items():
            if name == "rewards/accuracies" and expected is plain[0]:
                continue  # Margins are 0 but for rounding, and it counts their signs.
            # A margin is a difference of log-probs, each of which has seven digits.
            assert found[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name
    assert plain[0]["rewards/margins"] == pytest.approx(0, abs=1e-6)
    assert abs(plain[-1]["rewards/margins"]) > 0.01


def full_disk_job(folder, batch, cache):
    """The error of every rank where one of them cannot write."""
    from rl_megatron.errors import CheckpointError

    process = start("dp2")
    writer = RefCacheWriter(cache, FINGERPRINT, process)
    for first in (0, 4):
        part = batch.select(range(first, first + 4)).with_fields(paired=False)
        if process.rank == 1:
            writer.folder = cache / "not" / "there"
        writer.add(part, torch.zeros(part.num_tokens))
    with pytest.raises(CheckpointError) as error:
        writer.publish({})
    return str(error.value)


def test_all_ranks_stop_where_one_cannot_write(pool, folder, batch, tmp_path):
    said = pool(2).run(full_disk_job, folder, batch, tmp_path / "cache")
    assert said[0] == said[1] and "could not be written" in said[0]
    assert not (tmp_path / "cache" / "manifest.json").exists()


def test_a_cache_that_is_published_meanwhile_is_the_same_for_all_ranks(pool, built):
    cache, _ = built("dp2")
    seen = pool(2).run(race_job, cache)
    assert seen[0] is not None and seen[0] == seen[1]


def test_what_only_rank_0_meets_stops_all(pool, batch, tmp_path):
    cache = tmp_path / "broken"
    cache.mkdir()
    (cache / "manifest.json").write_text("{")
    first, second = pool(2).run(broken_job, cache, batch)
    assert first == second and len(first) == 2
    assert "manifest.json" in first[0]
    assert "no space left" in first[1] and "Make room there" in first[1]
