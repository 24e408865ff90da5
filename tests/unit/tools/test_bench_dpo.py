"""The benches of DPO: what they measure is a run of DPO, and TRL's is the same run."""

import importlib.util
import json
import math

import pytest

from rl_megatron.data.preferences import load_preferences
from rl_megatron.data.tokenizer import load_tokenizer
from tools.bench import dpo_vs_trl, ref_cache
from tools.bench.dpo_task import TaskSize, make_run, write_task

TINY = TaskSize(pairs=6, batch=2, median=12, longest=24, hidden=32, layers=1, vocab=64)
FLAGS = [f"--{name}={value}" for name, value in vars(TINY).items()]


def test_pairs_have_the_lengths_that_are_asked_for(tmp_path):
    size = TaskSize(pairs=400, batch=2, median=40, longest=128, hidden=32, layers=1, vocab=64)
    write_task(tmp_path, size)
    run = make_run(tmp_path, size, steps=1)
    tokenizer = load_tokenizer(tmp_path / "model")
    pairs = load_preferences(run.data.train, tokenizer, size.longest, "error")
    assert len(pairs) == size.pairs and all(pair.chosen.response_ids for pair in pairs)
    for side in ("prompt_ids", "response_ids"):
        lengths = sorted(len(getattr(pair.chosen, side)) for pair in pairs)
        assert lengths[200] == pytest.approx(20, abs=4)
    longest = max(len(p.chosen.prompt_ids) + len(p.rejected.response_ids) for p in pairs)
    assert 100 < longest <= size.longest


def test_the_cache_is_measured(capsys):
    ref_cache.main([*FLAGS, "--steps=3", "--repeats=1", "--json"])
    found = json.loads(capsys.readouterr().out)
    size = found.pop("size")
    assert size == vars(TINY)
    assert set(found) == {
        "response_tokens",
        "build_seconds",
        "build_ratio",
        "build_ratio_by_the_clock",
        "build_beside_forward",
        "bytes_per_token",
        "manifest_bytes",
        "read_seconds",
        "read_share",
        "reference_seconds",
        "step_seconds_with_cache",
        "step_seconds_without",
        "step_wall_seconds_with_cache",
        "step_wall_seconds_without",
        "peak_mib_with_cache",
        "peak_mib_without",
    }
    assert all(math.isfinite(value) and value > 0 for value in found.values())
    assert found["bytes_per_token"] > 4
    assert found["read_share"] < 1


@pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason="trl comes with the extra bench only"
)
def test_trl_has_the_same_losses(capsys):
    dpo_vs_trl.main([*FLAGS, "--steps=5", "--json"])
    found = json.loads(capsys.readouterr().out)
    ours = found["losses"]["ours"]
    assert len(ours) == len(found["losses"]["trl"]) == found["steps"] == 5
    assert ours[0] == pytest.approx(math.log(2), abs=1e-6)
    # The second pass over the data begins with step 4, and has learned something.
    assert ours[3] < ours[0] - 1e-3
    assert found["worst_loss_difference"] < 1e-4
    speeds = found["ours_steps_per_second"], found["trl_steps_per_second"]
    assert found["ratio"] == speeds[0] / speeds[1]
    assert found["trl_tokens_per_token"] >= 1


def test_without_trl_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(dpo_vs_trl.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="pip install"):
        dpo_vs_trl.main([])
