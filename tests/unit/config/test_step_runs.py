"""Settings of SFT, reward models and DPO that must fit: the exact text of what a user is told."""

import pytest

from rl_megatron.config import DPORun, KTORun, RewardModelRun, SFTRun, build_run
from tests.helpers.minimal_runs import DPO, KTO, SFT, complaint, with_settings

STEP_COMPLAINTS = {
    "no length": (
        {"train": {}},
        "train.num_steps = null: the length of the run is not set; set train.num_steps or "
        "train.num_epochs",
    ),
    "two lengths": (
        {"train__num_epochs": 2},
        "train.num_steps = 100: train.num_epochs (2) is set too; set one of the two to null",
    ),
    "an evaluation without rewards": (
        {"evaluation": {"data": {"path": "eval.jsonl"}}},
        "evaluation.rewards = []: nothing says how responses are scored; list at least one, e.g. "
        "{name: answer_tag}",
    ),
    "a reward of evaluation that cannot be earned": (
        {
            "data__eval": {"path": "eval.jsonl"},
            "evaluation": {"rewards": [{"name": "overlong", "buffer_tokens": 300}]},
        },
        "evaluation.rewards.0.buffer_tokens = 300: must not be above "
        "evaluation.max_response_tokens (256): even an empty response would be punished; lower it",
    ),
    "an evaluation measured by itself": (
        {
            "data__eval": {"path": "eval.jsonl"},
            "evaluation": {
                "rewards": [{"name": "reward_model", "path": "models/r", "normalize": "batch"}]
            },
        },
        "evaluation.rewards.0.normalize = 'batch': the mean would be 0 after every step; take none "
        "or fixed",
    ),
    "a warm-up longer than the run": (
        {"optimizer__lr_warmup_steps": 101},
        "optimizer.lr_warmup_steps = 101: must not be above the run's 100 optimiser steps "
        "(train.num_steps); lower it",
    ),
}


@pytest.mark.parametrize("run_class", [SFTRun, DPORun, KTORun])
@pytest.mark.parametrize("case", STEP_COMPLAINTS)
def test_sft_and_dpo_settings_that_do_not_fit(case, run_class):
    settings, text = STEP_COMPLAINTS[case]
    assert complaint(run_class, SFT, **settings) == text


def test_the_loss_of_sft_needs_no_kernel():
    assert complaint(SFTRun, SFT, kernels__losses="triton") == (
        "kernels.losses = 'triton': has no effect: the loss of supervised fine-tuning is a plain "
        "sum; remove this key"
    )


DPO_COMPLAINTS = {
    "robust against nothing": (
        {"loss__loss_type": "robust"},
        "loss.label_smoothing = 0.0: loss.loss_type robust corrects for labels that are wrong with "
        "this probability; set it, e.g. to 0.1, or take loss_type=sigmoid",
    ),
    "smoothing that is not read": (
        {"loss__loss_type": "ipo", "loss__label_smoothing": 0.1},
        "loss.label_smoothing = 0.1: has no effect: loss.loss_type ipo does not read it; remove "
        "this key",
    ),
    "a margin that is not asked for": (
        {"loss__simpo_gamma": 0.5},
        "loss.simpo_gamma = 0.5: has no effect: loss.loss_type sigmoid does not read it; remove "
        "this key",
    ),
    "a second likelihood": (
        {"loss__loss_type": "orpo", "loss__rpo_alpha": 1.0},
        "loss.rpo_alpha = 1.0: has no effect: loss.loss_type orpo does not read it; remove this "
        "key",
    ),
    "a reference that is not read": (
        {"loss__loss_type": "simpo", "reference__path": "models/other"},
        'reference = {"path": "models/other", "precompute_ref_logprobs": true,...: has no effect: '
        "loss.loss_type simpo has no reference; remove this key",
    ),
    "a place for a reference that is not held": (
        {"reference__placement": "swapped"},
        "reference.placement = 'swapped': has no effect: reference.precompute_ref_logprobs is "
        "true, so no reference is held; remove this key or set that to false",
    ),
    "a cache that is not read": (
        {"reference__precompute_ref_logprobs": False, "reference__cache": "cache"},
        "reference.cache = 'cache': has no effect: reference.precompute_ref_logprobs is false; "
        "remove this key or set that to true",
    ),
    "a loss that is none": (
        {"loss__loss_type": "sigmod"},
        "loss.loss_type = 'sigmod': must be one of sigmoid, sigmoid_norm, robust, hinge, ipo, "
        "simpo, orpo; did you mean 'sigmoid'?",
    ),
}


@pytest.mark.parametrize("case", DPO_COMPLAINTS)
def test_dpo_10_an_option_that_a_loss_ignores_is_refused(case):
    settings, text = DPO_COMPLAINTS[case]
    assert complaint(DPORun, DPO, **settings) == text


KTO_COMPLAINTS = {
    "smoothing, which it does not have": (
        {"loss__label_smoothing": 0.1},
        "loss.label_smoothing = 0.1: unknown key; known here: beta, loss_type, desirable_weight, "
        "undesirable_weight",
    ),
    "a margin, which it does not have": (
        {"loss__simpo_gamma": 0.5},
        "loss.simpo_gamma = 0.5: unknown key; known here: beta, loss_type, desirable_weight, "
        "undesirable_weight",
    ),
    "a loss of pairs": (
        {"loss__loss_type": "sigmoid"},
        "loss.loss_type = 'sigmoid': must be one of kto, apo_zero_unpaired",
    ),
    "a weight that takes all of one kind out": (
        {"loss__undesirable_weight": 0.0},
        "loss.undesirable_weight = 0.0: must be above 0.0; without this key it is 1.0",
    ),
    "a kernel": (
        {"kernels__losses": "triton"},
        "kernels.losses = 'triton': has no effect: KTO works on one number a response, by torch; "
        "remove this key",
    ),
    "one pass": (
        {"kernels__one_pass": True},
        "kernels.one_pass = true: has no effect: a loss of whole responses is known only after all "
        "their tokens; remove this key",
    ),
    "a field of pairs": (
        {"data__train__chosen_key": "good"},
        "data.train.chosen_key = 'good': has no effect: unpair is false: rows have one response; "
        "set it to true, or remove this key",
    ),
    "a verdict on pairs": (
        {"data__train__unpair": True, "data__train__label_key": "good"},
        "data.train.label_key = 'good': has no effect: unpair is true: pairs have chosen and "
        "rejected; remove this key",
    ),
    "a split of a file": (
        {"data__eval": {"easy": {"path": "e.jsonl", "split": "test"}}},
        "data.eval.easy.split = 'test': has no effect: a .jsonl file has no splits; remove this "
        "key",
    ),
}


@pytest.mark.parametrize("case", KTO_COMPLAINTS)
def test_what_kto_does_not_read_is_refused(case):
    settings, text = KTO_COMPLAINTS[case]
    assert complaint(KTORun, KTO, **settings) == text


def test_kto_has_the_drift_and_the_reference_of_dpo():
    assert complaint(KTORun, KTO, drift__num_prompts=8).startswith("drift = ")
    run = build_run(KTORun, KTO)
    assert run.needs_reference and not run.watches_drift
    assert not build_run(DPORun, with_settings(DPO, loss__loss_type="orpo")).needs_reference


def test_dpo_label_smoothing_stays_below_a_half():
    assert complaint(DPORun, DPO, loss__label_smoothing=0.5) == (
        "loss.label_smoothing = 0.5: must be below 0.5; without this key it is 0.0"
    )


def test_held_out_rows_are_one_set_or_several_by_name():
    none, one = build_run(SFTRun, SFT), with_settings(SFT, data__eval={"path": "e.jsonl"})
    assert none.data.held_out == {}
    assert {name: s.path for name, s in build_run(SFTRun, one).data.held_out.items()} == {
        "": "e.jsonl"
    }
    sets = {"easy": {"path": "e.jsonl"}, "hard": {"path": "h.jsonl", "prompt_key": "question"}}
    several = build_run(SFTRun, with_settings(SFT, data__eval=sets)).data.held_out
    assert list(several) == ["easy", "hard"]
    assert several["hard"].path == "h.jsonl" and several["hard"].prompt_key == "question"


HELD_OUT_COMPLAINTS = {
    "a key that no source has": (
        {"easy": {"path": "e.jsonl", "promt_key": "q"}},
        "data.eval.easy.promt_key = 'q': unknown key; did you mean 'prompt_key'?",
    ),
    "no path": (
        {"easy": {"prompt_key": "q"}},
        "data.eval.easy.path: is required; set it: A .jsonl file, a folder, or a name on the "
        "Hugging Face hub.",
    ),
    "what has no effect in one of them": (
        {"easy": {"path": "e.jsonl", "split": "test"}},
        "data.eval.easy.split = 'test': has no effect: a .jsonl file has no splits; remove this "
        "key",
    ),
    "a name that no metric could have": (
        {"so hard": {"path": "e.jsonl"}},
        "data.eval = 'so hard': has the wrong form: Held-out rows; or several sets of "
        "them, {name: {path: ...}, ...}, names of letters, digits, _ and -. Metrics of a set are "
        "evaluation/<name>/...",
    ),
    "a set among the settings of one": (
        {"path": "e.jsonl", "hard": {"path": "h.jsonl"}},
        'data.eval.hard = {"path": "h.jsonl"}: unknown key; known here: path, split, prompt_key, '
        "response_key, chosen_key, rejected_key, answer_key",
    ),
    "not a section": (
        "e.jsonl",
        "data.eval = 'e.jsonl': must be a section, with settings such as path, split, prompt_key, "
        "response_key",
    ),
}


@pytest.mark.parametrize("case", HELD_OUT_COMPLAINTS)
def test_held_out_sets_that_are_wrong(case):
    held_out, text = HELD_OUT_COMPLAINTS[case]
    assert complaint(SFTRun, SFT, data__eval=held_out) == text


def test_of_several_sets_the_one_whose_prompts_are_answered_is_named():
    settings = {
        "data__eval": {"easy": {"path": "e.jsonl"}},
        "evaluation": {"rewards": [{"name": "answer_tag"}]},
    }
    assert complaint(SFTRun, SFT, **settings) == (
        "evaluation.data = null: data.eval has several sets; say whose prompts are answered by "
        "evaluation.data.path"
    )


REWARD_MODEL_COMPLAINTS = {
    "an evaluation": (
        {"data__eval": {"path": "eval.jsonl"}, "evaluation": {"rewards": [{"name": "answer_tag"}]}},
        "has no effect: a reward model answers no prompts; remove this section, and set data.eval "
        "for its accuracy on held-out pairs",
    ),
    "a kernel of another head": (
        {"kernels__linear_logprob": "cpu"},
        "kernels.linear_logprob = 'cpu': has no effect: a reward model has a head of one row; "
        "remove this key",
    ),
    "centering by nothing": (
        {"loss__center_rewards_coefficient": 0.0},
        "loss.center_rewards_coefficient = 0.0: must be above 0.0; without this key it is null",
    ),
}


@pytest.mark.parametrize("case", REWARD_MODEL_COMPLAINTS)
def test_reward_model_settings_that_do_not_fit(case):
    settings, text = REWARD_MODEL_COMPLAINTS[case]
    assert complaint(RewardModelRun, SFT, **settings).endswith(text)


def test_only_a_reward_model_reads_margins():
    key = {"data__train__margin_key": "margin"}
    assert build_run(RewardModelRun, with_settings(SFT, **key)).data.train.margin_key == "margin"
    assert build_run(RewardModelRun, SFT).data.train.margin_key is None
    assert complaint(DPORun, DPO, **key).startswith("data.train.margin_key = 'margin': unknown key")
