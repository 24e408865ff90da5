"""From logits to a token and its log-prob: every rule against a hand-worked number."""

import math

import numpy as np
import pytest
import torch

from rl_megatron.errors import NumericsError
from rl_megatron.interfaces.records import Sampling
from rl_megatron.rollout.sampling import allowed_logits, sample
from rl_megatron.rollout.seeds import stream_key, uniforms

INF = math.inf


def rules(temperature=1.0, **more):
    return Sampling(
        **{"temperature": temperature, "max_response_tokens": 9, "stop_token_ids": ()} | more
    )


def logprobs(logits, sampling, num_sampled=0):
    logits = torch.as_tensor(logits)[None]
    return allowed_logits(logits, sampling, torch.tensor([num_sampled]))[0].log_softmax(dim=0)


def draw(logits, sampling, numbers, num_sampled=0):
    """Tokens and log-probs for each uniform number, from the same logits."""
    rows = torch.as_tensor(logits).expand(len(numbers), -1)
    counts = torch.full((len(numbers),), num_sampled)
    tokens, values = sample(rows, sampling, counts, np.asarray(numbers, dtype=np.float64))
    return tokens.tolist(), values


@pytest.mark.parametrize(
    ("temperature", "expected"),
    [
        (1.0, [-0.407606, -1.407606, -2.407606]),
        (0.7, [-0.260118, -1.688690, -3.117261]),
        (0.5, [-0.142932, -2.142932, -4.142932]),
        (0.0, [-0.407606, -1.407606, -2.407606]),
    ],
)
def test_lp_01_logprobs_are_of_the_tempered_distribution(temperature, expected):
    found = logprobs([2.0, 1.0, 0.0], rules(temperature))
    torch.testing.assert_close(found, torch.tensor(expected), atol=1e-6, rtol=0)


def test_a_log_prob_is_the_exact_one_to_the_last_float32():
    # Between 8 and 16 nats float32 are 9.5e-7 apart, and half of that is what rounding once costs.
    logits = 3 * torch.randn(4000, generator=torch.Generator().manual_seed(0))
    tokens, values = draw(logits, rules(0.8), np.linspace(0, 1, 200, endpoint=False))
    exact = (logits / 0.8).double().log_softmax(dim=0)[tokens]
    assert exact.min() < -8
    assert float((values.double() - exact).abs().max()) <= 4.8e-7


def test_lp_07_nucleus_logprobs_are_of_what_is_kept():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    found = logprobs(logits, rules(top_p=0.8))
    torch.testing.assert_close(found[:2], torch.tensor([-0.470004, -0.980829]), atol=1e-6, rtol=0)
    assert found[2:].tolist() == [-INF, -INF]
    raw = logprobs(logits, rules())
    assert float(raw[0]) == pytest.approx(-0.693147, abs=1e-6)


def test_nucleus_is_the_smallest_set_that_reaches_the_mass_in_any_order():
    logits = torch.tensor([0.05, 0.5, 0.15, 0.3]).log()
    kept = lambda p: torch.isfinite(logprobs(logits, rules(top_p=p))).tolist()  # noqa: E731
    assert kept(0.01) == [False, True, False, False]
    assert kept(0.49) == [False, True, False, False]
    assert kept(0.51) == [False, True, False, True]
    assert kept(0.81) == [False, True, True, True]
    assert kept(0.96) == [True, True, True, True]


def test_top_k_keeps_k_and_renormalises():
    found = logprobs([0.0, 3.0, 1.0, 2.0], rules(top_k=2))
    expected = torch.tensor([3.0, 2.0]).log_softmax(0)
    torch.testing.assert_close(found[[1, 3]], expected)
    assert found[[0, 2]].tolist() == [-INF, -INF]
    assert torch.isfinite(logprobs([0.0, 3.0], rules(top_k=5))).all()


def test_min_p_drops_what_is_far_below_the_likeliest():
    logits = torch.tensor([0.6, 0.29, 0.11]).log()
    found = logprobs(logits, rules(min_p=0.2))
    assert found[2] == -INF
    assert float(found[0]) == pytest.approx(math.log(0.6 / 0.89), abs=1e-6)


def test_rules_act_in_order_on_what_the_ones_before_left():
    # top_k leaves 0.5, 0.3; of these, 0.5 alone has 0.625 of the mass.
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert logprobs(logits, rules(top_k=2, top_p=0.6)).tolist() == [0.0, -INF, -INF, -INF]
    # The temperature comes first: at 0.5 the likeliest has 0.685 of the mass.
    assert logprobs(logits, rules(0.5, top_p=0.68)).tolist() == [0.0, -INF, -INF, -INF]


def test_stop_tokens_wait_for_the_minimum():
    sampling = rules(min_response_tokens=2, stop_token_ids=(0, 2))
    logits = [5.0, 1.0, 4.0, 0.0]
    for num_sampled in (0, 1):
        found = logprobs(logits, sampling, num_sampled)
        assert found[[0, 2]].tolist() == [-INF, -INF]
        torch.testing.assert_close(found[[1, 3]], torch.tensor([1.0, 0.0]).log_softmax(0))
    torch.testing.assert_close(logprobs(logits, sampling, 2), torch.tensor(logits).log_softmax(0))


def test_each_row_counts_its_own_tokens():
    sampling = rules(0.0, min_response_tokens=2, stop_token_ids=(0,))
    logits = torch.tensor([[2.0, 1.0]] * 3)
    tokens, _ = sample(logits, sampling, torch.tensor([1, 2, 0]), np.zeros(3))
    assert tokens.tolist() == [1, 0, 1]


def test_greedy_takes_the_mode_of_what_is_allowed():
    tokens, values = draw([1.0, 3.0, 2.0], rules(0.0), [0.999])
    assert tokens == [1]
    assert float(values[0]) == pytest.approx(-0.407606, abs=1e-6)
    sampling = rules(0.0, min_response_tokens=1, stop_token_ids=(1,))
    tokens, values = draw([1.0, 3.0, 2.0], sampling, [0.0])
    assert tokens == [2]
    assert math.isfinite(values[0])


def test_greedy_tells_apart_what_log_softmax_in_float32_cannot():
    logits = torch.full((150_000,), 0.1)
    logits[70_000] = torch.nextafter(logits[0], torch.tensor(1.0))
    assert draw(logits, rules(0.0), [0.0])[0] == [70_000]


def test_inversion_at_the_edges_of_the_cumulated_mass():
    logits = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0]).log()
    tokens, values = draw(logits, rules(), [0.0, 0.2499, 0.2501, 1 - 2.0**-53])
    assert tokens == [1, 1, 3, 3]
    torch.testing.assert_close(values, torch.tensor([0.25, 0.25, 0.75, 0.75]).log())


def test_sampling_follows_the_distribution():
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(12, generator=generator)
    number = 40_000
    numbers = uniforms([stream_key(0, i) for i in range(number)], [0] * number)
    for sampling in (rules(), rules(0.6), rules(1.3, top_p=0.9), rules(top_k=4)):
        tokens, values = draw(logits, sampling, numbers)
        p = logprobs(logits, sampling).double().exp()
        counts = torch.bincount(torch.tensor(tokens), minlength=12)
        assert not counts[p == 0].any()
        expected = number * p[p > 0]
        chi_square = float(((counts[p > 0] - expected) ** 2 / expected).sum())
        # At most 11 degrees of freedom; above 31 once in a thousand.
        assert chi_square < 31
        torch.testing.assert_close(values, logprobs(logits, sampling)[tokens])


def test_bfloat16_logits_give_float32_logprobs():
    logits = torch.zeros(1000, dtype=torch.bfloat16)
    logits[0] = 8.0
    found = logprobs(logits, rules())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found[:2], torch.tensor([-0.289026, -8.289026]), atol=1e-6, rtol=0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_broken_logits_are_reported(temperature, bad):
    with pytest.raises(NumericsError, match="logits are not finite"):
        draw([0.0, bad, 1.0], rules(temperature), [0.5])


def test_no_allowed_token_is_reported():
    sampling = rules(min_response_tokens=1, stop_token_ids=(0, 1))
    with pytest.raises(NumericsError):
        draw([0.0, 1.0], sampling, [0.5])
