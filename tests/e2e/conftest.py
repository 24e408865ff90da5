"""The task and the runs that several tests look at, each made once."""

from __future__ import annotations

import pytest

from tests.helpers.recipe_runs import (
    KL_IN_LOSS,
    KL_IN_REWARD,
    REWARD,
    RUN_CLASSES,
    TENSOR_2,
    execute,
    run_recipe,
    write_yaml,
    zero,
)
from tools.make_addition_task import write_task


@pytest.fixture(scope="session")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    write_task(folder, seed=0, repeats=1)
    # Held-out rows are read whole at every evaluation.
    for name in ("sft.jsonl", "heldout_preferences.jsonl"):
        lines = (folder / name).read_text().splitlines(keepends=True)
        (folder / name).write_text("".join(lines[:64]))
    (folder / "reward.py").write_text(REWARD)
    for recipe in RUN_CLASSES:
        write_yaml(recipe, folder)
    return folder


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="session")
def sft(task, runs):
    return run_recipe("sft", task, runs / "sft")


@pytest.fixture(scope="session")
def sft_dp2(task, runs):
    return run_recipe("sft", task, runs / "sft_dp2", ranks=2)


@pytest.fixture(scope="session")
def after_sft(sft):
    return f"model.path={sft.folder / 'checkpoints'}"


@pytest.fixture(scope="session")
def grpo(task, runs, after_sft):
    return run_recipe("grpo", task, runs / "grpo", after_sft, *KL_IN_LOSS)


@pytest.fixture(scope="session")
def grpo_tp2(task, runs, after_sft):
    return run_recipe("grpo", task, runs / "grpo_tp2", after_sft, *KL_IN_LOSS, *TENSOR_2, ranks=2)


@pytest.fixture(scope="session")
def grpo_kl_in_reward(task, runs):
    return run_recipe("grpo", task, runs / "grpo_kl_in_reward", *KL_IN_REWARD)


@pytest.fixture(scope="session")
def grpo_torch(task, runs):
    backend = ("backend=torch",)
    return run_recipe("grpo", task, runs / "grpo_torch", *KL_IN_REWARD, *backend)


@pytest.fixture(scope="session")
def grpo_zero3(task, runs):
    return run_recipe("grpo", task, runs / "grpo_zero3", *KL_IN_REWARD, *zero(3, runs), ranks=2)


@pytest.fixture(scope="session")
def dpo_zero2(task, runs):
    cache = f"reference.cache={runs / 'dpo_cache'}"
    done = execute("tools/ref_cache.py", "build", "--recipe", "dpo", task / "dpo.yaml", cache)
    assert done.returncode == 0, done.stderr
    words = (cache, "reference.build_cache=false", *zero(2, runs))
    return run_recipe("dpo", task, runs / "dpo_zero2", *words, ranks=2)


@pytest.fixture(scope="session")
def dpo(task, runs, after_sft):
    return run_recipe("dpo", task, runs / "dpo", after_sft)


@pytest.fixture(scope="session")
def dpo_dp2(task, runs, after_sft):
    swapped = "reference={precompute_ref_logprobs: false, placement: swapped}"
    return run_recipe("dpo", task, runs / "dpo_dp2", after_sft, swapped, ranks=2)


@pytest.fixture(scope="session")
def kto(task, runs):
    cache = f"reference.cache={runs / 'kto_cache'}"
    words = ("build", "--recipe", "kto", task / "kto.yaml", cache)
    done = execute("tools/ref_cache.py", *words)
    assert done.returncode == 0, done.stderr
    return run_recipe("kto", task, runs / "kto", cache, "reference.build_cache=false")
