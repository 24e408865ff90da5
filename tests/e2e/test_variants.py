"""DAPO whole, from the command line: refilled batches, cut responses, one rank against two."""

import pytest

from rl_megatron.checkpoint.run_state import read_run_state
from tests.e2e.test_recipes import assert_same_numbers
from tests.helpers.recipe_runs import TENSOR_2, execute, read_rows, run_recipe

DAPO = (
    "rollout.group_size=2",
    "rollout.prompts_per_batch=6",
    "rollout.dynamic_sampling={reward: digits}",
    "algorithm.mask_truncated_responses=true",
    "algorithm.rollout_is=truncate",
    "loss.clip_ratio_high=0.28",
    "loss.entropy_coef=0.01",
    "train.mini_batch_size=6",
    "train.num_rollout_batches=3",
    "evaluation=",
)
# Both are means over tokens of advantages times ratios, which are about 1 and cancel: to 0.03 and,
# less the entropy bonus of 0.024, to 0.004 in the first step. Two ranks are up to 6e-8 apart, which
# is one rounding of 1 in float32, and more than 1e-5 of anything below 0.006.
FLOORS = {"loss/total": 0.1, "loss/policy": 0.1}


@pytest.fixture(scope="module")
def dapo(task, runs, after_sft):
    return run_recipe("grpo", task, runs / "dapo", after_sft, *DAPO)


def test_batches_are_filled_with_groups_that_differ(dapo):
    assert len(dapo.rows) == 3
    for row in dapo.rows:
        assert row["rollout/zero_variance_fraction"] == 0
        assert row["rollout/refills"] >= 0
        assert row["rollout/masked_responses"] == 12 * row["rollout/truncated_fraction"]
        assert row["rollout/is_weight_mean"] == pytest.approx(1, abs=1e-4)
        assert row["rollout/is_bounded_fraction"] == 0
        assert row["loss/entropy"] > 0
    assert sum(row["rollout/replaced_groups"] for row in dapo.rows) > 0
    (folder,) = (dapo.folder / "checkpoints").glob("iter_*")
    drawn = 3 * 6 + sum(row["rollout/replaced_groups"] for row in dapo.rows)
    assert read_run_state(folder).parts["prompts"]["position"] == drawn


def test_two_ranks_fill_their_batches_with_the_same_groups(dapo, task, runs, after_sft):
    two = run_recipe("grpo", task, runs / "dapo_tp2", after_sft, *DAPO, *TENSOR_2, ranks=2)
    rollouts = (read_rows(run.folder / "rollouts.jsonl") for run in (dapo, two))
    assert next(rollouts) == next(rollouts)
    assert_same_numbers(dapo.rows, two.rows, floors=FLOORS)


def test_a_batch_that_never_fills_ends_the_run(task, runs):
    folder = runs / "hopeless"
    settings = ("rollout.dynamic_sampling={reward: answer_tag, max_refills: 1}", "evaluation=")
    words = (str(task / "grpo.yaml"), f"output_dir={folder}", *settings)
    done = execute("recipes/grpo/train.py", *words)
    assert done.returncode == 1
    assert "rollout.dynamic_sampling.max_refills = 1: rollout batch 1 has 0 of 4" in done.stderr
    assert "8 have 0 throughout" in done.stderr
    assert "Traceback" not in done.stderr
