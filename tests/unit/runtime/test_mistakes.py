"""Mistakes in model, data, rewards or layout are told before the first step, with the remedy."""

import json
from contextlib import nullcontext

import pytest
import torch

from rl_megatron.config import DPORun, GRPORun, SFTRun, build_run
from rl_megatron.errors import CheckpointError, ConfigError, DataError
from rl_megatron.metrics.timing import Span
from rl_megatron.parallel.layout import Layout
from rl_megatron.parallel.process import Process
from rl_megatron.runtime.build import build_policy, start_process
from rl_megatron.runtime.tasks import build_dpo, build_grpo, build_sft
from tests.helpers.minimal_runs import GRPO, SFT, with_settings

ALONE = Process(Layout(), 0, torch.device("cpu"))
PLAIN = {"backend": "torch"}


@pytest.fixture
def model(task, tmp_path):
    """A copy of the model's folder without its weights: nothing here gets as far as them."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in (task / "model").iterdir():
        if file.suffix == ".json":
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


def sft(task, path="sft.jsonl", **settings):
    given = {"model__path": str(task / "model"), "data__train__path": str(task / path)}
    return build_run(SFTRun, with_settings(SFT, **(PLAIN | given | settings)))


def grpo(task, path="prompts.jsonl", **settings):
    given = {"model__path": str(task / "model"), "data__train__path": str(task / path)}
    return build_run(GRPORun, with_settings(GRPO, **(PLAIN | given | settings)))


def test_a_missing_model_folder(task):
    said = "^model.path models/tiny does not exist; name the model's folder"
    with pytest.raises(CheckpointError, match=said):
        build_sft(sft(task, model__path="models/tiny"), ALONE)


def test_a_model_folder_without_weights(task, model):
    said = rf"^model.path {model} has config.json but no weights: .*safetensors are read; copy"
    with pytest.raises(CheckpointError, match=said):
        build_sft(sft(task, model__path=str(model)), ALONE)


def test_a_missing_part_of_the_weights(task, model):
    index = {"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors.* again"):
        build_sft(sft(task, model__path=str(model)), ALONE)


def test_a_missing_reference_is_named_as_one(task):
    run = with_settings(
        SFT,
        backend="torch",
        model__path=str(task / "model"),
        data__train__path=str(task / "preferences.jsonl"),
        reference__path="models/tiny",
    )
    with pytest.raises(CheckpointError, match=r"^reference.path models/tiny does not exist"):
        build_dpo(build_run(DPORun, run), ALONE)


@pytest.mark.parametrize("key", ["model", "reference"])
def test_a_megatron_checkpoint_under_the_plain_backend(key, task, tmp_path):
    checkpoint = tmp_path / "iter_0000004"
    (checkpoint / "hf").mkdir(parents=True)
    (checkpoint / "metadata.json").touch()
    (checkpoint / ".metadata").touch()
    for file in (task / "model").glob("*.json"):
        (checkpoint / "hf" / file.name).write_bytes(file.read_bytes())
    given = {
        "backend": "torch",
        "model__path": str(task / "model"),
        "data__train__path": str(task / "preferences.jsonl"),
    }
    run = with_settings(SFT, **(given | {f"{key}__path": str(checkpoint)}))
    said = (
        rf"^{key}.path {checkpoint} is a Megatron checkpoint, and backend torch reads Hugging Face "
        "folders only; set backend=megatron, or make a folder of it with "
        r"tools/convert_checkpoint.py export"
    )
    with pytest.raises(CheckpointError, match=said):
        build_dpo(build_run(DPORun, run), ALONE)


def test_a_broken_line(task, tmp_path):
    lines = (task / "prompts.jsonl").read_text().splitlines()
    lines[2] = lines[2][:-1]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    said = rf"^{tmp_path}/rows.jsonl:3: not valid JSON: .*; mend or remove the line"
    with pytest.raises(DataError, match=said):
        build_grpo(grpo(task, data__train__path=str(tmp_path / "rows.jsonl")), ALONE)


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_empty_data(content, task, tmp_path):
    (tmp_path / "rows.jsonl").write_text(content)
    with pytest.raises(DataError, match=rf"data.train.path: {tmp_path}/rows.jsonl has no rows"):
        build_sft(sft(task, data__train__path=str(tmp_path / "rows.jsonl")), ALONE)


def test_a_tokenizer_larger_than_the_model(task, model):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": 30}))
    (model / "model.safetensors").touch()
    said = (
        rf"^model.tokenizer_path: the tokenizer of {model} has token ids up to 31, but the model's "
        "vocab_size is 30; use the tokenizer that the model was trained with"
    )
    with pytest.raises(DataError, match=said):
        build_sft(sft(task, model__path=str(model)), ALONE)


def test_rows_without_the_answer_that_a_reward_compares_with(task):
    said = (
        r"^data.train.answer_key = 'answer': no row of .*/sft.jsonl has this field, and the reward "
        "answer_tag compares with it; name the field that holds the answers"
    )
    with pytest.raises(DataError, match=said):
        build_grpo(grpo(task, "sft.jsonl"), ALONE)


def test_held_out_rows_without_the_answer(task):
    held_out = {"path": str(task / "sft.jsonl")}
    evaluation = {"data": held_out, "rewards": [{"name": "answer_tag"}]}
    with pytest.raises(DataError, match=r"^evaluation.data.answer_key = 'answer': no row of"):
        build_sft(sft(task, evaluation=evaluation), ALONE)
    evaluation.pop("data")
    with pytest.raises(DataError, match=r"^data.eval.answer_key = 'answer': no row of"):
        build_sft(sft(task, evaluation=evaluation, data__eval=held_out), ALONE)


def test_a_held_out_set_that_is_not_there_is_named(task):
    held_out = {"easy": {"path": str(task / "sft.jsonl")}, "hard": {"path": "no.jsonl"}}
    with pytest.raises(DataError, match=r"^data.eval.hard.path: no.jsonl cannot be read"):
        build_sft(sft(task, data__eval=held_out), ALONE)


def test_a_reward_that_asks_for_no_answer_needs_none(task):
    rewards = [{"name": "length", "max_tokens": 3}]
    settings = {"rollout__prompts_per_batch": 2, "rollout__max_response_tokens": 4}
    run = grpo(task, "sft.jsonl", rewards=rewards, **settings)
    sampled = build_grpo(run, ALONE).groups.sample(1, lambda name: nullcontext(Span()), 0)
    assert {rollout.prompt.answer for rollout in sampled.rollouts} == {None}
    assert None not in sampled.scores.rewards


def test_a_reward_function_that_is_not_there(task):
    rewards = [{"name": "python", "path": f"{task}/none.py:score"}]
    with pytest.raises(ConfigError, match=r"rewards.python.path: '.*none.py:score': there is no"):
        build_grpo(grpo(task, rewards=rewards), ALONE)


def test_a_layout_that_does_not_divide_the_ranks(task):
    run = sft(task, backend="megatron", parallel__tensor_model_parallel_size=2)
    said = r"parallel.tensor_model_parallel_size = 2: .* must divide world size \(3\); change the"
    with pytest.raises(ConfigError, match=said):
        start_process(run, 3)


def test_a_layout_that_does_not_divide_the_heads(task):
    run = sft(task, backend="megatron", parallel__tensor_model_parallel_size=4)
    said = (
        r"parallel.tensor_model_parallel_size = 4: must divide the model's num_key_value_heads "
        r"\(2\); this model can take 1, 2"
    )
    with pytest.raises(ConfigError, match=said):
        build_policy(run, ALONE, None)


def test_a_balance_loss_of_a_model_without_experts(task):
    run = sft(task, backend="megatron", model__moe_aux_loss_coeff=0.01)
    said = r"^model.moe_aux_loss_coeff = 0.01: the model has no experts .*model_type llama.* remove"
    with pytest.raises(ConfigError, match=said):
        build_policy(run, ALONE, None)


def test_the_plain_backend_under_torchrun(task):
    said = "backend = 'torch': runs in one process, and 2 were launched; start it with python"
    with pytest.raises(ConfigError, match=said):
        start_process(sft(task), 2)
