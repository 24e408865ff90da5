"""YAML files, parents, overrides, and all mistakes at once."""

import pytest

from rl_megatron.config import GRPORun, KTORun, SFTRun, build_run, dump_run, load_run
from rl_megatron.errors import ConfigError
from tests.helpers.minimal_runs import GRPO, KTO, SFT, with_settings

MINIMAL = """\
name: a-run
model: {path: models/tiny}
data: {train: {path: rows.jsonl}}
"""
SFT_YAML = MINIMAL + "train: {num_steps: 100}\n"
GRPO_YAML = MINIMAL + "rewards: [{name: answer_tag}]\ntrain: {num_rollout_batches: 10}\n"


@pytest.fixture
def load(tmp_path, monkeypatch):
    """`load(run_class, text, *overrides)`: the run in run.yaml."""
    monkeypatch.chdir(tmp_path)

    def load(run_class, text, *overrides):
        (tmp_path / "run.yaml").write_text(text)
        return load_run(run_class, "run.yaml", overrides)

    return load


def lines_of(load, *arguments):
    with pytest.raises(ConfigError) as error:
        load(*arguments)
    return str(error.value).splitlines()


def test_all_mistakes_at_once_each_with_place_and_remedy(load):
    text = """\
name: a run
seed: -1
model:
  pth: models/tiny
  dtype: float16
data: {train: {path: rows.jsonl}}
rollout:
  temperature: 0
  groupsize: 4
rewards:
  - name: answer_tg
  - {name: length, min_token: 3}
  - {weight: 3}
algorithm: {group_size: 3, kl_ctrl: {type: adaptive}}
loss:
  clip_ratio_low: 2
  use_kl_loss: "yes"
  kl_loss_coef: 1e-6
loss:
  clip_ratio_hgh: 0.3
train: 3
steps: 10
"""
    overrides = ["optimizer.lrr=3", "seed=x", "rewards.7.weight=1", "seed.x=3", "evaluation.rows=3"]
    assert lines_of(load, GRPORun, text, *overrides, "oops") == [
        "23 mistakes in run.yaml:",
        "  loss is given twice, at run.yaml:15 and at run.yaml:19; remove one",
        "  rewards.7.weight (command line): rewards has no item 7; it has 3, counted from 0",
        "  seed.x (command line): seed is not a section",
        "  'oops' (command line): must be key.path=value",
        "  name = 'a run' (run.yaml:1): has the wrong form: What the run is called: letters and "
        "digits, and after the first also . _ -",
        "  seed = 'x' (command line): must be a whole number; without this key it is 0",
        "  model.path: is required; set it: Hugging Face folder, or a checkpoint made by "
        "`tools/convert_checkpoint.py import`.",
        "  model.dtype = 'float16' (run.yaml:5): must be one of float32, bfloat16; did you mean "
        "'bfloat16'?",
        "  model.pth = 'models/tiny' (run.yaml:4): unknown key; did you mean 'path'?",
        "  optimizer.lrr = 3 (command line): unknown key; did you mean 'lr'?",
        "  evaluation.rows = 3 (command line): unknown key; did you mean 'max_rows'?",
        "  rollout.groupsize = 4 (run.yaml:9): unknown key; did you mean 'group_size'?",
        "  rewards.0.name = 'answer_tg' (run.yaml:11): must be one of math_answer, answer_tag, "
        "format_tags, length, overlong, python, reward_model; did you mean 'answer_tag'?",
        "  rewards.1.min_token = 3 (run.yaml:12): unknown key; did you mean 'min_tokens'?",
        '  rewards.2 = {"weight": 3} (run.yaml:13): has no `name`, which says what it is; add one',
        "  algorithm.kl_ctrl.target_kl: is required; set it: The KL of a response, summed over "
        "its tokens, that is aimed at, in nats.",
        "  algorithm.group_size = 3 (run.yaml:14): unknown key; did you mean 'rollout.group_size'?",
        "  loss.clip_ratio_low = 2 (run.yaml:16): must be at most 1.0; without this key it is 0.2",
        "  loss.use_kl_loss = 'yes' (run.yaml:17): must be true or false; without this key it is "
        "false",
        "  loss.clip_ratio_hgh = 0.3 (run.yaml:20): unknown key; did you mean 'clip_ratio_high'?",
        "  train = 3 (run.yaml:21): must be a section, with settings such as micro_batch_size, "
        "max_tokens_per_micro_batch, save_interval, eval_interval",
        "  steps = 10 (run.yaml:22): unknown key; known here: name, seed, output_dir, backend, "
        "model, data, parallel, deepspeed, cluster, optimizer, kernels, checkpoint, logging, "
        "evaluation, reference, rollout, rewards, algorithm, loss, train",
        "  rollout.temperature = 0.0 (run.yaml:8): training samples, so it must be above 0 (greedy "
        "is for evaluation); take 1.0",
    ]


def test_settings_that_do_not_fit_are_reported_beside_wrong_ones(load):
    lines = lines_of(load, GRPORun, GRPO_YAML, "sed=1", "train.mini_batch_size=48")
    assert lines[0] == "2 mistakes in run.yaml:"
    assert lines[1].startswith("  sed = 1 (command line): unknown key; did you mean 'seed'?")
    assert lines[2].startswith("  train.mini_batch_size = 48 (command line): must divide")


def test_nothing_is_said_that_only_follows_from_another_mistake(load):
    # With group_size taken out, 20 would not divide 32 x 8; with use_kl_loss, the rest is idle.
    lines = lines_of(
        load,
        GRPORun,
        GRPO_YAML,
        "rollout.group_size=five",
        "train.mini_batch_size=20",
        "loss.use_kl_loss=maybe",
        "loss.kl_loss_coef=0.1",
    )
    assert [line.split(" = ")[0] for line in lines[1:]] == [
        "  rollout.group_size",
        "  loss.use_kl_loss",
    ]


def test_small_numbers_are_numbers(load):
    run = load(SFTRun, SFT_YAML + "optimizer: {lr: 1e-6, adam_eps: 2.5E-9, clip_grad: 1e3}\n")
    assert (run.optimizer.lr, run.optimizer.adam_eps) == (1e-6, 2.5e-9)
    assert run.optimizer.clip_grad == 1000
    assert load(SFTRun, SFT_YAML, "optimizer.lr=3e-5").optimizer.lr == 3e-5


def test_quoted_numbers_are_text(load):
    assert lines_of(load, SFTRun, SFT_YAML + 'optimizer: {lr: "1e-6"}\n')[1] == (
        "  optimizer.lr = '1e-6' (run.yaml:5): must be a number; without this key it is 1e-06"
    )


def test_true_is_not_a_number_and_2_5_not_a_whole_one(load):
    lines = lines_of(load, SFTRun, SFT_YAML, "seed=true", "train.log_interval=2.5", "name=3")
    assert lines[1:] == [
        "  name = 3 (command line): must be text (quotes make it so)",
        "  seed = true (command line): must be a whole number; without this key it is 0",
        "  train.log_interval = 2.5 (command line): must be a whole number; without this key it "
        "is 1",
    ]


def test_nan_and_inf_are_refused(load):
    lines = lines_of(load, SFTRun, SFT_YAML, "optimizer.lr=.nan", "optimizer.clip_grad=.inf")
    assert [line.split(": ", 1)[1].split(";")[0] for line in lines[1:]] == [
        "must be a finite number",
        "must be a finite number",
    ]


def test_overrides_win_and_reach_into_lists_and_missing_sections(load):
    run = load(
        GRPORun,
        GRPO_YAML + "evaluation: null\n",
        "rewards.0.weight=0.5",
        "rollout.stop_token_ids=[1, 2]",
        "data.train.path=other.jsonl",
        "evaluation.data.path=eval.jsonl",
        "model.tokenizer_path=null",
    )
    assert run.rewards[0].weight == 0.5
    assert run.rollout.stop_token_ids == (1, 2)
    assert run.data.train.path == "other.jsonl"
    assert run.evaluation.data.path == "eval.jsonl"


def test_items_of_lists_stay_strict(load):
    assert lines_of(load, GRPORun, GRPO_YAML, 'rollout.stop_token_ids=["1"]')[1:] == [
        "  rollout.stop_token_ids.0 = '1' (command line): must be a whole number; without this "
        "key it is []"
    ]


def test_an_empty_override_takes_a_setting_out(load):
    with_kl = GRPO_YAML + "loss: {use_kl_loss: true, kl_loss_coef: 0.1}\n"
    run = load(GRPORun, with_kl, "loss.use_kl_loss=false", "loss.kl_loss_coef=", "seed=")
    assert not run.needs_reference
    assert run.loss.kl_loss_coef == 0.001


def test_an_override_given_twice_is_refused(load):
    assert lines_of(load, SFTRun, SFT_YAML, "seed=1", "seed=2")[1:] == [
        "  seed (command line): is given twice; remove one"
    ]


def test_an_override_that_is_not_yaml_is_refused(load):
    lines = lines_of(load, SFTRun, SFT_YAML, "seed=[1")
    assert lines[1].startswith("  'seed=[1': command line: not valid YAML: ")


def test_missing_file_broken_yaml_and_a_list(tmp_path, load):
    with pytest.raises(ConfigError, match=r"^none\.yaml: no such file"):
        load_run(SFTRun, "none.yaml")
    assert lines_of(load, SFTRun, "a: [1\nb: 2\n")[0].startswith("run.yaml:2: not valid YAML: ")
    assert lines_of(load, SFTRun, "- 1\n") == [
        "run.yaml: must hold settings, one `key: value` a line"
    ]


def test_a_parent_holds_where_the_child_is_silent(tmp_path, load):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "parent.yaml").write_text(
        GRPO_YAML + "seed: 3\nrollout: {group_size: 4, prompts_per_batch: 2}\n"
        "algorithm:\n  use_kl_in_reward: true\n  kl_coef: 0.1\n"
        "  kl_ctrl: {type: adaptive, target_kl: 6}\n"
    )
    run = load(
        GRPORun,
        "extends: base/parent.yaml\nname: child\nrollout: {group_size: 8}\n"
        "rewards: [{name: math_answer}]\nalgorithm: {kl_ctrl: {type: fixed}}\n",
    )
    assert (run.name, run.output_dir, run.seed) == ("child", "runs/child", 3)
    assert (run.rollout.group_size, run.rollout.prompts_per_batch) == (8, 2)
    assert [r.name for r in run.rewards] == ["math_answer"]
    assert run.algorithm.kl_ctrl.type == "fixed"


def test_mistakes_name_the_file_they_are_in(tmp_path, load):
    (tmp_path / "parent.yaml").write_text(SFT_YAML + "sed: 3\n")
    assert lines_of(load, SFTRun, "extends: parent.yaml\nnamed: x\n")[1:] == [
        "  sed = 3 (parent.yaml:5): unknown key; did you mean 'seed'?",
        "  named = 'x' (run.yaml:2): unknown key; did you mean 'name'?",
    ]


def test_one_parent_only(tmp_path, load):
    (tmp_path / "parent.yaml").write_text("extends: grandparent.yaml\n" + SFT_YAML)
    assert lines_of(load, SFTRun, "extends: parent.yaml\n")[1:] == [
        "  extends = 'grandparent.yaml' (parent.yaml:1): a parent cannot have a parent; move its "
        "settings into parent.yaml"
    ]
    assert lines_of(load, SFTRun, "extends: [a.yaml, b.yaml]\n" + SFT_YAML)[1:] == [
        "  extends = ['a.yaml', 'b.yaml'] (run.yaml:1): must be the path of one YAML file"
    ]
    assert lines_of(load, SFTRun, "extends: none.yaml\n") == [
        "extends = 'none.yaml' (run.yaml:1): none.yaml: no such file; check the path"
    ]


ROUND_TRIPS = {
    "sft": (SFTRun, SFT, {"name": "1e-6", "evaluation": None}),
    "sft with several held-out sets": (
        SFTRun,
        SFT,
        {"data__eval": {"easy": {"path": "e.jsonl"}, "2-hard": {"path": "o/h", "split": "test"}}},
    ),
    "kto on pairs": (
        KTORun,
        KTO,
        {"data__train__unpair": True, "data__eval": {"a": {"path": "a.jsonl"}}},
    ),
    "grpo": (GRPORun, GRPO, {}),
    "grpo with everything": (
        GRPORun,
        GRPO,
        {
            "loss__use_kl_loss": True,
            "loss__kl_loss_coef": 1e-7,
            "reference__path": "models/other: 'quoted' # not a comment",
            "rollout__stop_token_ids": [1, 2],
            "rewards": [
                {"name": "length", "max_tokens": 5, "weight": -0.5},
                {"name": "python", "path": "a.py:f"},
            ],
            "evaluation": {"data": {"path": "owner/rows", "split": "test"}, "max_rows": 3},
            "optimizer__lr_schedule": "cosine",
            "optimizer__min_lr": 1e-8,
            "train__micro_batch_size": 2,
        },
    ),
    "grpo with a KL that adapts": (
        GRPORun,
        GRPO,
        {
            "algorithm__use_kl_in_reward": True,
            "algorithm__kl_coef": 0.05,
            "algorithm__kl_ctrl": {"type": "adaptive", "target_kl": 6},
        },
    ),
}


@pytest.mark.parametrize("case", ROUND_TRIPS)
def test_a_printed_run_loads_to_an_equal_run(case, load):
    run_class, data, settings = ROUND_TRIPS[case]
    run = build_run(run_class, with_settings(data, **settings))
    printed = dump_run(run)
    again = load(run_class, printed)
    assert again == run
    assert dump_run(again) == printed
