import pytest

from rl_megatron.errors import ConfigError
from rl_megatron.rewards.length import length, overlong


@pytest.mark.parametrize(
    ("num_tokens", "reward"), [(0, 0), (60, 0), (80, 0), (85, -0.25), (90, -0.5), (100, -1)]
)
def test_rw_09_overlong_grows_over_the_buffer(num_tokens, reward):
    assert overlong(num_tokens, max_response_tokens=100, buffer_tokens=20) == reward


def test_overlong_is_scaled_and_stops_at_the_maximum():
    numbers = {"max_response_tokens": 100, "buffer_tokens": 20, "penalty_factor": 0.5}
    assert overlong(90, **numbers) == -0.25
    assert overlong(130, **numbers) == -0.5


def test_rw_09_a_buffer_beyond_the_maximum_is_refused():
    with pytest.raises(ConfigError, match=r"buffer_tokens \(120\).*max_response_tokens \(100\)"):
        overlong(60, max_response_tokens=100, buffer_tokens=120)


@pytest.mark.parametrize(
    ("num_tokens", "reward"), [(0, -0.5), (9, -0.5), (10, 0), (20, 0), (21, -0.5)]
)
def test_length_outside_the_bounds_costs_the_penalty(num_tokens, reward):
    assert length(num_tokens, min_tokens=10, max_tokens=20, penalty=0.5) == reward


def test_a_bound_that_is_not_set_does_not_bind():
    assert length(10**6, min_tokens=1) == 0
    assert length(0, max_tokens=5) == 0
