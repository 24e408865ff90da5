import math

import pytest

from rl_megatron.config import DPORun, GRPORun, KTORun, build_run
from rl_megatron.errors import NumericsError
from rl_megatron.interfaces import metric_names as names
from rl_megatron.runtime.guards import (
    check_first_dpo_step,
    check_first_grpo_step,
    check_first_kto_step,
)
from tests.helpers.minimal_runs import DPO, GRPO, KTO, with_settings

LN_2 = math.log(2)
WITH_KL = {"loss__use_kl_loss": True}


def grpo(ratio=1.0, kl=0.0, skipped=0.0, **settings):
    metrics = {
        names.POLICY_RATIO_MEAN: ratio,
        names.POLICY_KL_TO_REFERENCE: kl,
        names.OPTIMIZER_SKIPPED: skipped,
    }
    check_first_grpo_step(build_run(GRPORun, with_settings(GRPO, **settings)), metrics)


def dpo(margin=0.0, loss=LN_2, skipped=0.0, **settings):
    metrics = {
        names.REWARDS_MARGINS: margin,
        names.LOSS_DPO: loss,
        names.OPTIMIZER_SKIPPED: skipped,
    }
    check_first_dpo_step(build_run(DPORun, with_settings(DPO, **settings)), metrics)


def kto(chosen=0.0, kl=0.0, skipped=0.0, **settings):
    metrics = {names.REWARDS_CHOSEN: chosen, names.KL: kl, names.OPTIMIZER_SKIPPED: skipped}
    check_first_kto_step(build_run(KTORun, with_settings(KTO, **settings)), metrics)


def test_what_holds_passes():
    grpo(ratio=1 + 5e-5)
    grpo(kl=5e-5, **WITH_KL)
    dpo(margin=-5e-5, loss=LN_2 + 5e-5)
    kto(chosen=-5e-5, kl=5e-5)  # A mini-batch without undesirable responses.


@pytest.mark.parametrize("ratio", [1.001, 0.999, math.nan])
def test_a_ratio_other_than_1_stops_the_run(ratio):
    said = rf"policy/ratio_mean is {ratio} .* must be 1 .*dropout"
    with pytest.raises(NumericsError, match=said):
        grpo(ratio=ratio)


def test_a_kl_to_an_equal_reference_stops_the_run():
    with pytest.raises(NumericsError, match=r"policy/kl_to_reference is 0\.001 .* must be 0 "):
        grpo(kl=0.001, **WITH_KL)
    grpo(kl=0.001, **WITH_KL, reference__path="models/other")
    grpo(kl=0.001)  # No KL is used, so nobody has measured it.


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ({"margin": 0.001}, "rewards/margins is 0.001 .* must be 0 "),
        ({"loss": 0.7}, "loss/dpo is 0.7 .* must be 0.693147 "),
    ],
)
def test_dpo_that_does_not_start_at_ln_2_stops_the_run(broken, said):
    with pytest.raises(NumericsError, match=said):
        dpo(**broken)
    dpo(**broken, reference__path="models/other")
    dpo(**broken, skipped=1.0)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ({"chosen": 0.001}, "rewards/chosen is 0.001 .* must be 0 "),
        ({"kl": 0.002}, "kl is 0.002 .* must be 0 "),
    ],
)
def test_kto_that_does_not_start_at_0_stops_the_run(broken, said):
    with pytest.raises(NumericsError, match=said):
        kto(**broken)
    kto(**broken, reference__path="models/other")
    kto(**broken, skipped=1.0)


# Losses at margin 0; ipo's is (1 / (2 beta))^2.
OTHER_LOSSES = {
    "robust": (LN_2, {"loss__label_smoothing": 0.1}),
    "hinge": (1.0, {}),
    "ipo": (6.25, {"loss__beta": 0.2}),
}


@pytest.mark.parametrize("loss_type", OTHER_LOSSES)
def test_other_losses_start_at_their_own_value(loss_type):
    start, settings = OTHER_LOSSES[loss_type]
    dpo(loss=start, loss__loss_type=loss_type, **settings)
    with pytest.raises(NumericsError, match="loss/dpo is 3.0 "):
        dpo(loss=3.0, loss__loss_type=loss_type, **settings)


def test_a_loss_without_reference_starts_anywhere():
    dpo(margin=1.5, loss=0.2, loss__loss_type="simpo")


def test_bfloat16_may_round():
    grpo(ratio=1.02, model__dtype="bfloat16")
    with pytest.raises(NumericsError):
        grpo(ratio=1.06, model__dtype="bfloat16")


def test_a_skipped_step_says_nothing():
    grpo(ratio=0.0, skipped=1.0)
