"""Settings that must fit each other: the exact text of what a user is told."""

import pytest

from rl_megatron.config import DPORun, GRPORun, SFTRun, build_run, dump_run
from tests.helpers.minimal_runs import DPO, GRPO, SFT, complaint, with_settings


@pytest.mark.parametrize(("run_class", "run"), [(SFTRun, SFT), (DPORun, DPO), (GRPORun, GRPO)])
def test_the_least_that_a_run_must_say(run_class, run):
    built = build_run(run_class, run)
    assert built.output_dir == "runs/a-run"
    assert built.train.max_tokens_per_micro_batch == 8192
    assert built.optimizer.lr == 1e-6
    with pytest.raises(ValueError, match="frozen"):
        built.seed = 1


GRPO_COMPLAINTS = {
    "a layout that does not divide": (
        {"parallel__tensor_model_parallel_size": 3, "cluster__gpus_per_node": 8},
        "parallel.tensor_model_parallel_size = 3: tensor (3) x pipeline (1) x context (1) must "
        "divide world size (8); change the degrees or the number of ranks",
    ),
    "pipeline stages that do not divide": (
        {
            "parallel__tensor_model_parallel_size": 2,
            "parallel__pipeline_model_parallel_size": 3,
            "cluster__gpus_per_node": 8,
        },
        "parallel.pipeline_model_parallel_size = 3: tensor (2) x pipeline (3) x context (1) must "
        "divide world size (8); change the degrees or the number of ranks",
    ),
    "nodes without ranks": (
        {"cluster__num_nodes": 2},
        "cluster.num_nodes = 2: has no effect: cluster.gpus_per_node is null; set it, or remove "
        "this key",
    ),
    "padding to a budget in tokens": (
        {"train__packed": False},
        "train.packed = false: padding would exceed a budget in tokens; set train.micro_batch_size",
    ),
    "ranks that cannot share experts": (
        {"parallel__expert_model_parallel_size": 2, "cluster__gpus_per_node": 3},
        "parallel.expert_model_parallel_size = 2: must divide data (3) x context (1), the ranks "
        "that can share experts; change it, another degree or the number of ranks",
    ),
    "sequence parallel alone": (
        {"parallel__sequence_parallel": True},
        "parallel.sequence_parallel = true: splits activations over tensor-parallel ranks, and "
        "there is only one; raise parallel.tensor_model_parallel_size or set this to false",
    ),
    "virtual stages without stages": (
        {"parallel__virtual_pipeline_model_parallel_size": 2},
        "parallel.virtual_pipeline_model_parallel_size = 2: needs more than one pipeline stage; "
        "raise parallel.pipeline_model_parallel_size or remove this key",
    ),
    "a mini-batch that does not divide": (
        {"train__mini_batch_size": 48},
        "train.mini_batch_size = 48: must divide the rollout batch of 256 sequences "
        "(rollout.prompts_per_batch 32 x rollout.group_size 8); take 32 or 64",
    ),
    "a mini-batch above the rollout batch": (
        {"train__mini_batch_size": 300},
        "train.mini_batch_size = 300: must divide the rollout batch of 256 sequences "
        "(rollout.prompts_per_batch 32 x rollout.group_size 8); take 256",
    ),
    "two sizes of a micro-batch": (
        {"train__micro_batch_size": 2, "train__max_tokens_per_micro_batch": 4096},
        "train.micro_batch_size = 2: train.max_tokens_per_micro_batch (4096) is set too; set one "
        "of the two to null",
    ),
    "a group of one": (
        {"rollout__group_size": 1},
        "rollout.group_size = 1: algorithm.adv_estimator grpo compares the responses of a group, "
        "so every advantage would be 0; take at least 2",
    ),
    "a group of one, leave-one-out": (
        {"rollout__group_size": 1, "algorithm__adv_estimator": "rloo"},
        "rollout.group_size = 1: algorithm.adv_estimator rloo compares the responses of a group, "
        "so every advantage would be 0; take at least 2",
    ),
    "a group of one, whitened around its own mean": (
        {"rollout__group_size": 1, "algorithm__adv_estimator": "reinforce_plus_plus_baseline"},
        "rollout.group_size = 1: algorithm.adv_estimator reinforce_plus_plus_baseline compares the "
        "responses of a group, so every advantage would be 0; take at least 2",
    ),
    "dynamic sampling that could never fill a batch": (
        {
            "rollout__group_size": 1,
            "rollout__dynamic_sampling": {},
            "algorithm__adv_estimator": "reinforce_plus_plus",
        },
        "rollout.group_size = 1: rewards of a group of one never differ, so "
        "rollout.dynamic_sampling could never fill a batch; take at least 2 or set "
        "rollout.dynamic_sampling=null",
    ),
    "dynamic sampling without a refill": (
        {"rollout__dynamic_sampling": {"max_refills": 0}},
        "rollout.dynamic_sampling.max_refills = 0: must be above 0; without this key it is 20",
    ),
    "dynamic sampling by a reward that the run has not": (
        {"rollout__dynamic_sampling": {"reward": "math_answer"}},
        "rollout.dynamic_sampling.reward = 'math_answer': is not a reward of this run; take one of "
        "answer_tag, or null for their sum",
    ),
    "dual clip of weights": (
        {"loss__loss_mode": "cispo", "loss__clip_ratio_c": 10.0},
        "loss.clip_ratio_c = 10.0: has no effect: loss.loss_mode cispo bounds the weight of both "
        "signs of the advantage by clip_ratio_high; remove this key",
    ),
    "a bound of importance weights that are off": (
        {"algorithm__rollout_is_threshold": 4.0},
        "algorithm.rollout_is_threshold = 4.0: has no effect: algorithm.rollout_is is none; set it "
        "to truncate or mask, or remove this key",
    ),
    "a level of importance weights that are off": (
        {"algorithm__rollout_is_level": "sequence"},
        "algorithm.rollout_is_level = 'sequence': has no effect: algorithm.rollout_is is none; set "
        "it to truncate or mask, or remove this key",
    ),
    "a bound that lets nothing through": (
        {"algorithm__rollout_is": "mask", "algorithm__rollout_is_threshold": 1.0},
        "algorithm.rollout_is_threshold = 1.0: must be above 1.0; without this key it is 2.0",
    ),
    "a loss mode that is not offered": (
        {"loss__loss_mode": "ppo"},
        "loss.loss_mode = 'ppo': must be one of vanilla, gspo, cispo",
    ),
    "an entropy bonus of the other sign": (
        {"loss__entropy_coef": -0.01},
        "loss.entropy_coef = -0.01: must be at least 0.0; without this key it is 0.0",
    ),
    "temperature 0": (
        {"rollout__temperature": 0},
        "rollout.temperature = 0.0: training samples, so it must be above 0 (greedy is for "
        "evaluation); take 1.0",
    ),
    "top_p": (
        {"rollout__top_p": 0.9},
        "rollout.top_p = 0.9: leaves out tokens that the trained distribution contains, so the "
        "ratio of new to old log-probs would be wrong; remove this key (off is 1.0)",
    ),
    "top_k": (
        {"rollout__top_k": 50},
        "rollout.top_k = 50: leaves out tokens that the trained distribution contains, so the "
        "ratio of new to old log-probs would be wrong; remove this key (off is 0)",
    ),
    "min_p": (
        {"rollout__min_p": 0.1},
        "rollout.min_p = 0.1: leaves out tokens that the trained distribution contains, so the "
        "ratio of new to old log-probs would be wrong; remove this key (off is 0.0)",
    ),
    "bounds of a response that cross": (
        {"rollout__min_response_tokens": 300},
        "rollout.min_response_tokens = 300: must not be above rollout.max_response_tokens (256); "
        "lower it or raise the maximum",
    ),
    "a KL loss that is off": (
        {"loss__kl_loss_coef": 0.01},
        "loss.kl_loss_coef = 0.01: has no effect: loss.use_kl_loss is false; set it to true, or "
        "remove this key",
    ),
    "a KL in the reward that is off": (
        {"algorithm__kl_coef": 0.01},
        "algorithm.kl_coef = 0.01: has no effect: algorithm.use_kl_in_reward is false; set it to "
        "true, or remove this key",
    ),
    "a KL in the reward of weight 0": (
        {"algorithm__use_kl_in_reward": True},
        "algorithm.kl_coef = 0.0: algorithm.use_kl_in_reward needs a coefficient above 0; set "
        "one, e.g. 0.001, or set algorithm.use_kl_in_reward=false",
    ),
    "the KL twice": (
        {
            "algorithm__use_kl_in_reward": True,
            "algorithm__kl_coef": 0.1,
            "loss__use_kl_loss": True,
        },
        "algorithm.use_kl_in_reward = true: loss.use_kl_loss is true too, and the KL would count "
        "twice; set one to false",
    ),
    "k1 as a loss": (
        {"loss__use_kl_loss": True, "loss__kl_loss_type": "k1"},
        "loss.kl_loss_type = 'k1': as a loss k1 has an expected gradient of zero: it adds noise "
        "and holds nothing back; take k2 (exact gradient) or k3, use algorithm.use_kl_in_reward "
        "instead, or set loss.allow_k1_loss=true",
    ),
    "a reference without a KL": (
        {"reference__placement": "swapped"},
        'reference = {"path": null, "placement": "swapped"}: has no effect: no KL is used; set '
        "loss.use_kl_loss=true or algorithm.use_kl_in_reward=true, or remove this key",
    ),
    "adv_eps of dr_grpo": (
        {"algorithm__adv_estimator": "dr_grpo", "algorithm__adv_eps": 1e-6},
        "algorithm.adv_eps = 1e-06: has no effect: algorithm.adv_estimator dr_grpo does not "
        "divide by the standard deviation; remove this key",
    ),
    "min_lr of a constant schedule": (
        {"optimizer__min_lr": 1e-7},
        "optimizer.min_lr = 1e-07: has no effect: optimizer.lr_schedule is constant; take linear "
        "or cosine, or remove this key",
    ),
    "a schedule that rises": (
        {"optimizer__min_lr": 1e-3, "optimizer__lr_schedule": "cosine"},
        "optimizer.min_lr = 0.001: must not be above optimizer.lr (1e-06); lower it",
    ),
    "a warm-up longer than the run": (
        {"optimizer__lr_warmup_steps": 21, "train__ppo_epochs": 2},
        "optimizer.lr_warmup_steps = 21: must not be above the run's 20 optimiser steps "
        "(train.num_rollout_batches x train.ppo_epochs x mini-batches); lower it",
    ),
    "held-out prompts without evaluation": (
        {"data__eval": {"path": "eval.jsonl"}},
        'data.eval = {"path": "eval.jsonl", "prompt_key": "prompt", "response_...: has no effect: '
        "evaluation is null; add an evaluation section, or remove this key",
    ),
    "an evaluation without prompts": (
        {"evaluation": {}},
        "evaluation.data = null: there are no held-out rows; set evaluation.data.path or "
        "data.eval.path",
    ),
    "a split of a file": (
        {"data__train__split": "test"},
        "data.train.split = 'test': has no effect: a .jsonl file has no splits; remove this key",
    ),
    "the engine of another backend": (
        {"backend": "torch", "rollout__engine": "megatron"},
        "rollout.engine = 'megatron': does not sample from the weights of backend torch; remove "
        "this key or change backend",
    ),
    "an engine without its backend": (
        {"rollout__engine": "hf"},
        "rollout.engine = 'hf': does not sample from the weights of backend megatron; remove "
        "this key or change backend",
    ),
    "balance of experts without Megatron": (
        {"backend": "torch", "model__moe_aux_loss_coeff": 0.01},
        "model.moe_aux_loss_coeff = 0.01: backend torch has no balance loss; remove this key or "
        "set backend=megatron",
    ),
    "a layout without Megatron": (
        {
            "backend": "torch",
            "parallel__tensor_model_parallel_size": 2,
        },
        "parallel.tensor_model_parallel_size = 2: backend torch runs in one process; set it to 1 "
        "or set backend=megatron",
    ),
    "ranks without Megatron": (
        {"backend": "torch", "cluster__gpus_per_node": 4},
        "cluster.gpus_per_node = 4: backend torch runs in one process, not 4; set "
        "cluster.num_nodes and this to 1, or take another backend",
    ),
    "a layout with ZeRO": (
        {"backend": "deepspeed", "parallel__context_parallel_size": 2},
        "parallel.context_parallel_size = 2: backend deepspeed shares a model by ZeRO "
        "(deepspeed.zero_stage); set it to 1 or set backend=megatron",
    ),
    "ZeRO without DeepSpeed": (
        {"deepspeed__zero_stage": 3},
        'deepspeed = {"zero_stage": 3, "offload_optimizer": "none", "offload_p...: has no effect: '
        "backend is megatron; set backend=deepspeed, or remove this section",
    ),
    "Megatron's optimizer with ZeRO": (
        {"backend": "deepspeed", "parallel__use_distributed_optimizer": False},
        "parallel.use_distributed_optimizer = false: has no effect: deepspeed.zero_stage says what "
        "the ranks share; remove this key",
    ),
    "offload of what is not shared": (
        {"backend": "deepspeed", "deepspeed": {"zero_stage": 0, "offload_optimizer": "cpu"}},
        "deepspeed.offload_optimizer = 'cpu': ZeRO offloads what it shares, and stage 0 shares "
        "nothing; raise deepspeed.zero_stage or remove this key",
    ),
    "offload of weights that are not shared": (
        {"backend": "deepspeed", "deepspeed": {"offload_param": "cpu"}},
        "deepspeed.offload_param = 'cpu': needs ZeRO stage 3; set deepspeed.zero_stage=3 or remove "
        "this key",
    ),
    "a disk that is not named": (
        {"backend": "deepspeed", "deepspeed": {"zero_stage": 3, "offload_optimizer": "nvme"}},
        "deepspeed.nvme_path = null: something is offloaded to nvme; name a folder on a fast local "
        "disk",
    ),
    "a disk that is not used": (
        {"backend": "deepspeed", "deepspeed__nvme_path": "/scratch"},
        "deepspeed.nvme_path = '/scratch': has no effect: nothing is offloaded to nvme; remove "
        "this key",
    ),
    "no reward": ({"rewards": []}, "rewards = []: must list at least 1"),
}


@pytest.mark.parametrize("case", GRPO_COMPLAINTS)
def test_grpo_settings_that_do_not_fit(case):
    settings, text = GRPO_COMPLAINTS[case]
    assert complaint(GRPORun, GRPO, **settings) == text


REWARD_COMPLAINTS = {
    "rw_09_iii buffer above the maximum": (
        [{"name": "overlong", "buffer_tokens": 120}],
        "rewards.0.buffer_tokens = 120: must not be above rollout.max_response_tokens (100): even "
        "an empty response would be punished; lower it",
    ),
    "minimum above the maximum of the rollout": (
        [{"name": "length", "min_tokens": 101}],
        "rewards.0.min_tokens = 101: is above rollout.max_response_tokens (100): every response "
        "would be punished; lower it",
    ),
    "bounds that cross": (
        [{"name": "length", "min_tokens": 10, "max_tokens": 5}],
        "rewards.0.min_tokens = 10: must not be above max_tokens (5); lower it",
    ),
    "no bound": (
        [{"name": "length"}],
        "rewards.0.min_tokens = 0: no bound is set; set min_tokens or max_tokens",
    ),
    "one name twice": (
        [{"name": "python", "path": "a.py:score"}, {"name": "python", "path": "b.py:score"}],
        "rewards.1.name = 'python': is recorded as 'score', and so is rewards.0; keep one of "
        "them, rename the function, or give the reward model another label",
    ),
    "a path without a function": (
        [{"name": "python", "path": "rewards.py"}],
        "rewards.0.path = 'rewards.py': has the wrong form: `package.module:function` or "
        "`path/to/file.py:function`.",
    ),
    "two reward models under one label": (
        [{"name": "reward_model", "path": "a"}, {"name": "reward_model", "path": "b"}],
        "rewards.1.name = 'reward_model': is recorded as 'reward_model', and so is rewards.0; keep "
        "one of them, rename the function, or give the reward model another label",
    ),
    "a fixed normalisation without numbers": (
        [{"name": "reward_model", "path": "a", "normalize": "fixed"}],
        "rewards.0.normalize = 'fixed': changes nothing without a mean or a std; set them, e.g. to "
        "evaluation/rewards/mean and evaluation/rewards/std of the model's training",
    ),
    "numbers without a fixed normalisation": (
        [{"name": "reward_model", "path": "a", "normalize": "batch", "mean": 1.0}],
        "rewards.0.mean = 1.0: has no effect: it is for normalize fixed; set that, or remove this "
        "key",
    ),
}


@pytest.mark.parametrize("case", REWARD_COMPLAINTS)
def test_rewards_that_do_not_fit(case):
    rewards, text = REWARD_COMPLAINTS[case]
    assert complaint(GRPORun, GRPO, rewards=rewards, rollout__max_response_tokens=100) == text


def test_batches_drawn_in_parts_have_no_normalisation_of_their_own():
    rewards = [{"name": "reward_model", "path": "a", "normalize": "batch"}]
    text = complaint(GRPORun, GRPO, rewards=rewards, rollout__dynamic_sampling={})
    assert text == (
        "rewards.0.normalize = 'batch': with rollout.dynamic_sampling a batch is drawn in parts, "
        "which would each be measured by its own mean; take fixed"
    )


def test_rw_09_a_buffer_as_long_as_the_maximum_is_accepted():
    rewards = [{"name": "overlong", "buffer_tokens": 100}]
    run = build_run(GRPORun, with_settings(GRPO, rewards=rewards, rollout__max_response_tokens=100))
    assert run.rewards[0].buffer_tokens == 100


def test_allow_k1_loss_is_for_k1_only():
    settings = {"loss__use_kl_loss": True, "loss__allow_k1_loss": True}
    assert build_run(GRPORun, with_settings(GRPO, **settings, loss__kl_loss_type="k1"))
    assert complaint(GRPORun, GRPO, **settings, loss__kl_loss_type="k2") == (
        "loss.allow_k1_loss = true: has no effect: loss.kl_loss_type is k2; remove this key"
    )


@pytest.mark.parametrize("adv_estimator", ["grpo", "reinforce_plus_plus"])
def test_what_divides_by_a_deviation_reads_adv_eps(adv_estimator):
    settings = {"algorithm__adv_estimator": adv_estimator, "algorithm__adv_eps": 1e-6}
    assert build_run(GRPORun, with_settings(GRPO, **settings)).algorithm.adv_eps == 1e-6


def test_one_response_per_prompt_suits_an_estimator_without_groups():
    settings = {"rollout__group_size": 1, "algorithm__adv_estimator": "reinforce_plus_plus"}
    assert build_run(GRPORun, with_settings(GRPO, **settings)).rollout_sequences == 32


def test_dynamic_sampling_by_the_name_of_a_function():
    run = with_settings(
        GRPO,
        rewards=[{"name": "python", "path": "mine.py:right"}],
        rollout__dynamic_sampling={"reward": "right"},
    )
    assert build_run(GRPORun, run).rollout.dynamic_sampling.max_refills == 20


WHOLE_SEQUENCES = {
    "dpo": (
        DPORun,
        DPO,
        {},
        "kernels.one_pass = true: has no effect: a loss of whole responses is known only after all "
        "their tokens; remove this key",
    ),
    "gspo": (
        GRPORun,
        GRPO,
        {"loss__loss_mode": "gspo"},
        "kernels.one_pass = true: has no effect: the loss of loss.loss_mode gspo is known only "
        "after a whole sequence; remove this key or take another loss_mode",
    ),
}


@pytest.mark.parametrize("case", WHOLE_SEQUENCES)
def test_one_pass_needs_a_loss_of_single_tokens(case):
    run_class, run, settings, text = WHOLE_SEQUENCES[case]
    assert complaint(run_class, run, kernels__one_pass=True, **settings) == text


@pytest.mark.parametrize(("run_class", "run"), [(GRPORun, GRPO), (SFTRun, SFT)])
def test_one_pass_suits_losses_of_single_tokens(run_class, run):
    assert build_run(run_class, with_settings(run, kernels__one_pass=True)).kernels.one_pass


def test_counts_of_a_grpo_run():
    run = build_run(
        GRPORun,
        with_settings(
            GRPO,
            rollout__prompts_per_batch=6,
            rollout__group_size=4,
            train__mini_batch_size=8,
            train__ppo_epochs=2,
        ),
    )
    assert (run.rollout_sequences, run.mini_batch_size, run.num_mini_batches) == (24, 8, 3)
    assert run.num_steps == 10 * 2 * 3
    whole = build_run(GRPORun, GRPO)
    assert (whole.mini_batch_size, whole.num_mini_batches, whole.num_steps) == (256, 1, 10)


def test_a_reference_is_needed_for_either_kl():
    assert not build_run(GRPORun, GRPO).needs_reference
    in_loss = with_settings(GRPO, loss__use_kl_loss=True, reference__placement="swapped")
    assert build_run(GRPORun, in_loss).needs_reference
    in_reward = with_settings(GRPO, algorithm__use_kl_in_reward=True, algorithm__kl_coef=0.1)
    assert build_run(GRPORun, in_reward).needs_reference


def test_evaluation_takes_what_it_does_not_say_from_the_run():
    grpo = build_run(GRPORun, with_settings(GRPO, evaluation={}, data__eval={"path": "e.jsonl"}))
    assert grpo.evaluation_data.path == "e.jsonl"
    assert grpo.evaluation_rewards == grpo.rewards
    assert grpo.evaluation_max_response_tokens == grpo.rollout.max_response_tokens == 256

    own = {
        "data": {"path": "own.jsonl"},
        "rewards": [{"name": "math_answer"}],
        "max_response_tokens": 7,
    }
    sft = build_run(SFTRun, with_settings(SFT, evaluation=own, data__eval={"path": "e.jsonl"}))
    assert sft.evaluation_data.path == "own.jsonl"
    assert [r.name for r in sft.evaluation_rewards] == ["math_answer"]
    assert sft.evaluation_max_response_tokens == 7


def test_settings_without_effect_are_not_printed():
    printed = dump_run(build_run(GRPORun, GRPO))
    assert "use_kl_loss: false" in printed
    for idle in ("kl_loss_coef", "kl_coef", "kl_ctrl", "reference", "min_lr", "split", "num_nodes"):
        assert f"{idle}:" not in printed
