"""A run of backend torch, stopped after every step, ends as one that is not."""

import pytest

from recipes.dpo.train import train as train_dpo
from recipes.sft.train import train
from rl_megatron.config import DPORun, SFTRun, build_run
from rl_megatron.runtime.stopping import Requeue
from tests.helpers.minimal_runs import with_settings
from tests.helpers.recipe_runs import settings
from tools.chaos import differences


def test_a_run_that_stops_after_every_step_ends_like_one_that_does_not(task, tmp_path):
    def run(name, **changes):
        return build_run(
            SFTRun,
            with_settings(
                settings("sft", task),
                backend="torch",
                output_dir=str(tmp_path / name),
                train={"num_steps": 4, "global_batch_size": 8},
                logging__tensorboard=False,
                evaluation=None,
                **changes,
            ),
        )

    train(run("unbroken"))
    for step in (1, 2, 3):
        with pytest.raises(Requeue, match=f"saved step {step},"):
            train(run("broken", checkpoint__exit_duration_in_minutes=1e-6))
    train(run("broken"))
    assert list(differences(tmp_path / "broken", tmp_path / "unbroken")) == []


def test_a_run_that_is_stopped_while_it_builds_its_cache_goes_on_with_the_build(task, tmp_path):
    def run(**changes):
        return build_run(
            DPORun,
            with_settings(
                settings("dpo", task),
                backend="torch",
                output_dir=str(tmp_path / "run"),
                train={"num_steps": 2, "global_batch_size": 8},
                reference={"cache": str(tmp_path / "cache")},
                logging__tensorboard=False,
                evaluation=None,
                **changes,
            ),
        )

    with pytest.raises(Requeue, match="is over: what is done so far is kept"):
        train_dpo(run(checkpoint__exit_duration_in_minutes=1e-6))
    shards = {path.name for path in (tmp_path / "cache").glob("*.safetensors")}
    assert len(shards) == 1 and not (tmp_path / "cache" / "manifest.json").exists()
    train_dpo(run())
    kept = {path.name for path in (tmp_path / "cache").glob("*.safetensors")}
    assert shards < kept and (tmp_path / "cache" / "manifest.json").exists()
