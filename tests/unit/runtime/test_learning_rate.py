"""The learning rate is a function of the step: hand-worked numbers."""

import pytest

from rl_megatron.config.optimizer import OptimizerConfig
from rl_megatron.runtime.learning_rate import learning_rate

COSINE = OptimizerConfig(lr=1e-4, lr_warmup_steps=10, lr_schedule="cosine")


@pytest.mark.parametrize(
    ("step", "expected"),
    [(1, 1e-5), (5, 5e-5), (10, 1e-4), (40, 7.5e-5), (41, 7.347358e-5), (55, 5e-5), (100, 0.0)],
)
def test_rs_05_any_step_has_the_rate_of_an_uninterrupted_run(step, expected):
    assert learning_rate(COSINE, step, 100) == pytest.approx(expected, rel=1e-6, abs=1e-15)


def test_past_the_end_it_stays_at_the_end():
    settings = OptimizerConfig(lr=1e-3, min_lr=1e-4, lr_schedule="linear")
    assert learning_rate(settings, 10, 10) == pytest.approx(1e-4)
    assert learning_rate(settings, 11, 10) == pytest.approx(1e-4)


def test_linear_falls_in_equal_steps_to_the_minimum():
    settings = OptimizerConfig(lr=1e-3, min_lr=2e-4, lr_schedule="linear", lr_warmup_steps=2)
    rates = [learning_rate(settings, step, 6) for step in range(1, 7)]
    assert rates == pytest.approx([5e-4, 1e-3, 8e-4, 6e-4, 4e-4, 2e-4])


def test_constant_is_constant_after_the_warm_up():
    settings = OptimizerConfig(lr=1e-3, lr_warmup_steps=3)
    rates = [learning_rate(settings, step, 5) for step in range(1, 6)]
    assert rates == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3, 1e-3, 1e-3])


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_warm_up_as_long_as_the_run_ends_at_the_full_rate(schedule):
    settings = OptimizerConfig(lr=1e-3, lr_schedule=schedule, lr_warmup_steps=4)
    assert learning_rate(settings, 4, 4) == 1e-3
