import math
from typing import get_args

import pytest
import torch

from rl_megatron.config.algorithm import AdaptiveKLConfig
from rl_megatron.config.loss import KLEstimator as ConfiguredKLEstimator
from rl_megatron.errors import NumericsError
from rl_megatron.losses.kl import (
    KL_ESTIMATORS,
    KLController,
    KLEstimator,
    k1,
    k2,
    k3,
    kl_penalised_rewards,
    sequence_kl,
)


def exact_k3(r: float) -> float:
    """exp(r) - 1 - r by its series where the terms would cancel."""
    if abs(r) < 0.5:
        return math.fsum(r**n / math.factorial(n) for n in range(2, 30))
    return math.exp(r) - 1 - r


def test_estimators_by_hand():
    r = torch.tensor([math.log(2.0), -1.0], dtype=torch.float64)
    assert k1(r).tolist() == pytest.approx([-0.693147181, 1.0])
    assert k2(r).tolist() == pytest.approx([0.240226507, 0.5])
    assert k3(r).tolist() == pytest.approx([0.306852819, 0.367879441])


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_k3_and_its_gradient_are_exact_for_small_and_large_r(sign, dtype):
    r = sign * torch.logspace(-7, 1, 161, dtype=torch.float64).clamp(max=10).to(dtype)
    r.requires_grad_()
    values = k3(r)
    values.sum().backward()
    for x, value, slope in zip(r.tolist(), values.tolist(), r.grad.tolist(), strict=True):
        assert value == pytest.approx(exact_k3(x), rel=1e-7, abs=0)
        # In float32 the gradient itself is rounded once.
        assert slope == pytest.approx(math.expm1(x), rel=1e-7, abs=0)


def test_k3_is_bounded_above_with_no_gradient_and_linear_below():
    r = torch.tensor([100.0, 21.0, -100.0], requires_grad=True)
    values = k3(r)
    values.sum().backward()
    at_bound = math.exp(20) - 21
    assert values.tolist() == pytest.approx([at_bound, at_bound, 99.0])
    assert r.grad.tolist() == [0.0, 0.0, -1.0]


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [
        # The true KL is 0.192745 and its gradient 0.221807; k2 is biased in value, k1 gives no
        # gradient, k3 that of the other direction.
        ("k1", 0.192745, 0.0),
        ("k2", 0.2 * math.log(2.5) ** 2 / 2 + 0.8 * math.log(1.6) ** 2 / 2, 0.221807),
        ("k3", 0.192745, 0.3),
    ],
)
def test_grpo_06_expected_value_and_gradient_as_a_loss(estimator, value, gradient):
    theta = torch.tensor(math.log(0.8 / 0.2), dtype=torch.float64, requires_grad=True)
    logprobs = torch.log_softmax(torch.stack([theta, theta.new_zeros(())]), dim=0)
    r = torch.log(torch.tensor([0.5, 0.5], dtype=torch.float64)) - logprobs
    # Tokens are drawn from the policy, and the draw itself is not differentiated.
    expected = (logprobs.exp().detach() * KL_ESTIMATORS[estimator](r)).sum()
    expected.backward()
    assert expected.item() == pytest.approx(value, abs=1e-6)
    assert theta.grad.item() == pytest.approx(gradient, abs=1e-6)


def test_estimators_are_those_of_the_configuration():
    assert KLEstimator == ConfiguredKLEstimator
    assert set(KL_ESTIMATORS) == set(get_args(KLEstimator))


def test_sequence_kl_sums_the_response_only():
    kl = sequence_kl(
        logprobs=torch.tensor([math.nan, -1.0, -2.0, 0.0, -3.0]),
        ref_logprobs=torch.tensor([0.0, -1.5, -1.0, math.inf, -3.5]),
        response_mask=torch.tensor([False, True, True, False, True]),
        cu_seqlens=torch.tensor([0, 3, 5]),
        kl_estimator="k1",
    )
    assert kl.tolist() == [0.5 - 1.0, 0.5]


def test_kl_in_the_reward_leaves_a_missing_reward_missing():
    penalised = kl_penalised_rewards(
        [1.0, None, 0.0], torch.tensor([2.0, 5.0, -1.0], dtype=torch.float64), kl_coef=0.1
    )
    assert penalised == [pytest.approx(0.8), None, pytest.approx(0.1)]


def test_kl_that_is_not_finite_is_not_taken_for_a_missing_reward():
    with pytest.raises(NumericsError, match="rollout 1"):
        kl_penalised_rewards([1.0, 1.0], torch.tensor([0.0, math.nan]), kl_coef=0.1)


def test_fixed_coefficient_stays():
    controller = KLController(0.05)
    controller.update(100.0)
    assert controller.kl_coef == 0.05


def test_adaptive_coefficient_by_hand():
    controller = KLController(1.0, target_kl=0.1, ema_decay=0.5)
    controller.update(0.2)  # average 0.2 > 0.15
    assert controller.kl_coef == pytest.approx(1.1)
    controller.update(0.06)  # average 0.13
    assert controller.kl_coef == pytest.approx(1.1 * 0.97)
    controller.update(0.15)  # average 0.14: above the target, not above 1.5 targets
    assert controller.kl_coef == pytest.approx(1.1 * 0.97 * 0.97)
    controller.update(0.2)  # average 0.17
    assert controller.kl_coef == pytest.approx(1.1 * 0.97 * 0.97 * 1.1)


def test_adaptive_coefficient_keeps_to_its_bounds():
    controller = KLController(1.0, target_kl=0.1, ema_decay=0.0, min_kl_coef=0.99, max_kl_coef=1.05)
    controller.update(1.0)
    assert controller.kl_coef == 1.05
    controller.update(0.0)
    controller.update(0.0)
    assert controller.kl_coef == 0.99


def test_controller_goes_on_where_it_stopped():
    klds = [0.3, 0.05, 0.2, 0.1, 0.4, 0.0, 0.0]
    whole = KLController(0.2, target_kl=0.1)
    first = KLController(0.2, target_kl=0.1)
    for kl in klds:
        whole.update(kl)
    for kl in klds[:3]:
        first.update(kl)
    second = KLController(0.2, target_kl=0.1)
    second.load_state_dict(first.state_dict())
    for kl in klds[3:]:
        second.update(kl)
    assert second.state_dict() == whole.state_dict()
    assert second.kl_coef != 0.2


def test_a_fixed_coefficient_comes_from_the_configuration_after_resume():
    controller = KLController(0.3)
    controller.load_state_dict(KLController(0.2).state_dict())
    assert controller.kl_coef == 0.3


@pytest.mark.parametrize("kl", [math.nan, math.inf])
def test_a_kl_that_is_not_finite_stops_the_controller(kl):
    with pytest.raises(NumericsError, match="kl_coef"):
        KLController(0.1, target_kl=0.1).update(kl)


def test_controller_takes_the_fields_of_its_configuration():
    config = AdaptiveKLConfig(type="adaptive", target_kl=0.1)
    controller = KLController(0.1, **config.model_dump(exclude={"type"}))
    controller.update(1.0)
    assert controller.kl_coef == pytest.approx(0.11)
