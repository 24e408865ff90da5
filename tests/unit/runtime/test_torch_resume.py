"""A run of backend torch, stopped after every step, ends as one that is not."""

import pytest

from recipes.sft.train import train
from rl_megatron.config import SFTRun, build_run
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
