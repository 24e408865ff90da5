"""tools/ref_cache.py from its command line: built ahead, killed at any moment, damaged, tidied."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest

from rl_megatron.checkpoint.ref_cache import read_manifest
from tests.helpers.pool import ROOT
from tests.helpers.recipe_runs import execute, run_recipe

TOOL = "tools/ref_cache.py"
# Builds that are killed, each once; RL_MEGATRON_KILLS=30 takes four minutes.
KILLS = int(os.environ.get("RL_MEGATRON_KILLS", "2"))


def build(task, cache, *overrides, ranks=1):
    words = ("build", task / "dpo.yaml", f"reference.cache={cache}", *overrides)
    done = execute(TOOL, *words, ranks=ranks)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def whole(task, tmp_path_factory):
    """A cache that nobody disturbed."""
    cache = tmp_path_factory.mktemp("whole") / "cache"
    done = build(task, cache)
    assert done.stdout == f"{cache}\n"
    return cache


def contents(cache):
    """Log-probs by key, of all rows that count."""
    from rl_megatron.checkpoint.ref_cache.shard import open_shard

    manifest = read_manifest(cache)
    found = {}
    for record in manifest.shards:
        rows = open_shard(cache / record.file, manifest.fingerprint.id)
        for key, start, end in zip(rows.keys, rows.offsets, rows.offsets[1:], strict=False):
            found[bytes(key)] = rows.logprobs[start:end].copy()
    return found


def assert_same_contents(cache, expected):
    found, wanted = contents(cache), contents(expected)
    assert found.keys() == wanted.keys()
    assert all(abs(found[key] - wanted[key]).max(initial=0) < 1e-5 for key in wanted)


def test_a_run_starts_from_what_was_built(task, runs, whole):
    words = (f"reference.cache={whole}", "reference.build_cache=false", "train.num_steps=1")
    before = {path: path.stat().st_mtime_ns for path in whole.iterdir()}
    # The held-out rows of the cache, by another name and twice: no row is missing.
    rows = f"{{path: {task / 'heldout_preferences.jsonl'}}}"
    words += ("loss.beta=0.7", "seed=9", f"data.eval={{easy: {rows}, hard: {rows}}}")
    run = run_recipe("dpo", task, runs / "prebuilt", *words)
    last = run.rows[-1]
    for metric in ("loss/dpo", "rewards/accuracies", "rewards/margins"):
        assert last[f"evaluation/easy/{metric}"] == last[f"evaluation/hard/{metric}"]
    assert f"from {whole}: no reference is held" in run.log
    assert "reference log-probs 1/" not in run.log
    assert {path: path.stat().st_mtime_ns for path in whole.iterdir()} == before


def test_a_run_that_may_not_build_says_what_is_missing(task, runs, whole, tmp_path):
    words = (str(task / "dpo.yaml"), "reference.build_cache=false", "train.num_steps=1")
    missing = execute(
        "recipes/dpo/train.py",
        *words,
        f"output_dir={tmp_path / 'a'}",
        f"reference.cache={tmp_path / 'nothing'}",
    )
    assert missing.returncode == 2
    assert f"There is no reference cache in {tmp_path / 'nothing'}" in missing.stderr
    other = execute(
        "recipes/dpo/train.py",
        *words,
        f"output_dir={tmp_path / 'b'}",
        f"reference.cache={whole}",
        "model.dtype=bfloat16",
    )
    assert other.returncode == 2
    assert "was made for something else" in other.stderr
    assert "dtype: 'float32' -> 'bfloat16'" in other.stderr


def kill_one_of(command, cache, after):
    """Start a build and kill all of it `after` seconds after its first own shard; whether it was.

    Shards of builds before are there from the start: a build is only at work with one of its own.
    """
    before = set(cache.glob("*ref-*"))
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while process.poll() is None and set(cache.glob("*ref-*")) <= before:
        time.sleep(0.002)
    time.sleep(after)
    killed = process.poll() is None
    if killed:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return killed


def test_a_build_that_is_killed_goes_on_where_it_was(task, whole, tmp_path):
    cache = tmp_path / "cache"
    generator = random.Random(0)
    kept, killed = 0, 0
    for attempt in range(KILLS):
        ranks = 1 + attempt % 2
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        launcher = torchrun if ranks > 1 else []
        words = ["build", str(task / "dpo.yaml"), f"reference.cache={cache}"]
        command = [sys.executable, *launcher, TOOL, *words]
        killed += kill_one_of(command, cache, generator.uniform(0, 0.4))
        shards = len(list(cache.glob("ref-*.safetensors")))
        assert shards >= kept, "a shard that had its name is gone"
        kept = shards
        if read_manifest(cache) is not None:
            # It was done: start over.
            shutil.rmtree(cache)
            kept = 0
    assert killed >= KILLS / 2, f"{killed} of {KILLS} were at work when they were to be killed"
    build(task, cache, ranks=2)
    assert_same_contents(cache, whole)


def test_verify_inspect_and_gc(task, whole, tmp_path):
    cache = tmp_path / "caches" / "one"
    shutil.copytree(whole, cache)
    (cache / ".ref-1.safetensors.77.tmp").write_bytes(b"half")
    assert execute(TOOL, "verify", tmp_path / "caches").stdout == f"{cache}: whole\n"
    shown = execute(TOOL, "inspect", cache).stdout
    assert (
        "response tokens" in shown and read_manifest(cache).fingerprint.fields["weights"] in shown
    )
    listed = execute(TOOL, "gc", cache).stdout
    assert listed == f"left over {cache / '.ref-1.safetensors.77.tmp'}\n"
    execute(TOOL, "gc", cache, "--delete")
    assert not (cache / ".ref-1.safetensors.77.tmp").exists()
    victim = sorted(cache.glob("ref-*.safetensors"))[0]
    victim.write_bytes(victim.read_bytes()[:-1])
    done = execute(TOOL, "verify", cache)
    assert done.returncode == 1
    assert f"{cache}: damaged" in done.stdout and str(victim) in done.stdout
    build(task, cache)
    assert execute(TOOL, "verify", cache).returncode == 0
    assert_same_contents(cache, whole)
