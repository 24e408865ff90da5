"""From a GRPO run to DPO on its rollouts: pairs, a reference that is its checkpoint, training."""

import json

import pytest

from rl_megatron.checkpoint.ref_cache import read_manifest
from tests.helpers.recipe_runs import execute, read_rows, run_recipe

TOOL = "tools/rollouts_to_preferences.py"


@pytest.fixture(scope="module")
def sampled(task, runs, after_sft):
    """A GRPO run that kept all its rollouts."""
    words = ("logging.rollouts_per_step=null", "evaluation=", "train.ppo_epochs=1")
    return run_recipe("grpo", task, runs / "grpo_kept", after_sft, *words)


@pytest.fixture(scope="module")
def preferences(sampled):
    done = execute(TOOL, sampled.folder, "--min-margin", "0.1")
    assert done.returncode == 0, done.stderr
    return sampled.folder / "preferences.jsonl", done.stdout


def test_pairs_are_the_best_and_the_worst_of_their_groups(sampled, preferences, task):
    path, said = preferences
    pairs = read_rows(path)
    assert f"wrote {len(pairs)} pairs of 8 groups to {path}" in said
    prompts = read_rows(task / "prompts.jsonl")
    groups = {}
    for rollout in read_rows(sampled.folder / "rollouts.jsonl"):
        group = groups.setdefault((rollout["step"], prompts[rollout["row_id"]]["prompt"]), {})
        if rollout["finish_reason"] == "stop":
            group.setdefault(rollout["reward"], []).append(rollout["response"])
    for pair in pairs:
        group = groups[pair["step"], pair["prompt"]]
        assert pair["chosen"] in group[max(group)] and pair["rejected"] in group[min(group)]
        assert pair["margin"] == pytest.approx(max(group) - min(group)) and pair["margin"] >= 0.1


def test_dpo_goes_on_from_the_grpo_checkpoint(task, runs, sampled, preferences, tmp_path):
    after_grpo = f"model.path={sampled.folder / 'checkpoints'}"
    words = (
        after_grpo,
        f"data.train.path={preferences[0]}",
        "data.eval=",
        "train.num_steps=1",
        f"reference.cache={tmp_path / 'cache'}",
    )
    run = run_recipe("dpo", task, tmp_path / "run", *words)
    assert run.rows[0]["loss/dpo"] == pytest.approx(0.693147, abs=1e-5)
    manifest = read_manifest(tmp_path / "cache")
    assert manifest.about["model"] == str(sampled.folder / "checkpoints")


def test_the_cache_of_the_model_before_is_refused(task, dpo, sampled, tmp_path):
    # `dpo` has filled the cache with log-probs of the SFT model.
    words = (f"model.path={sampled.folder / 'checkpoints'}", f"output_dir={tmp_path}")
    done = execute("recipes/dpo/train.py", str(task / "dpo.yaml"), *words)
    assert done.returncode == 2
    assert "was made for something else" in done.stderr and "weights: '" in done.stderr


def test_a_run_that_kept_too_little_says_so(grpo, tmp_path):
    done = execute(TOOL, grpo.folder, "--output", tmp_path / "p.jsonl")
    assert done.returncode == 2
    assert "logging.rollouts_per_step was 4. Set it to null" in done.stderr
    assert not (tmp_path / "p.jsonl").exists()
    done = execute(TOOL, tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr


def test_messages_stay_messages(tmp_path):
    from tests.helpers.minimal_runs import GRPO

    prompt = [{"role": "user", "content": "1+1="}]
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": prompt, "answer": "2"}) + "\n")
    data = {"train": {"path": str(tmp_path / "prompts.jsonl")}}
    run = GRPO | {"data": data, "rollout": {"group_size": 2, "prompts_per_batch": 1}}
    (tmp_path / "config.yaml").write_text(json.dumps(run))
    rows = [
        {
            "step": 1,
            "row_id": 0,
            "sample_index": i,
            "response": str(i),
            "reward": float(i),
            "finish_reason": "stop",
        }
        for i in (0, 1)
    ]
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert execute(TOOL, tmp_path).returncode == 0
    (pair,) = read_rows(tmp_path / "preferences.jsonl")
    assert pair["prompt"] == prompt
    assert pair["chosen"] == [{"role": "assistant", "content": "1"}]
