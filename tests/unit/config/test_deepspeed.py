"""A user's own DeepSpeed JSON beside what the run decides."""

import json

import pytest

from rl_megatron.config import GRPORun
from rl_megatron.config.deepspeed import DeepSpeedConfig, engine_settings, json_problems
from tests.helpers.minimal_runs import GRPO, complaint


@pytest.fixture
def config_of(tmp_path):
    def write(settings, **more):
        path = tmp_path / "ds.json"
        path.write_text(settings if isinstance(settings, str) else json.dumps(settings))
        return DeepSpeedConfig(config_path=str(path), **more)

    return write


def made(config):
    return engine_settings(config, "bfloat16", 1.0, 2)


def complaints(config):
    problems = list(json_problems(config, "bfloat16", 1.0))
    assert {(p.key, p.value) for p in problems} <= {("config_path", config.config_path)}
    return [problem.text for problem in problems]


def test_without_a_file_the_run_decides():
    settings = made(DeepSpeedConfig(zero_stage=3, offload_optimizer="nvme", nvme_path="/scratch"))
    assert settings["train_batch_size"] == 2
    assert settings["gradient_clipping"] == 1.0
    assert settings["bf16"]["enabled"] and settings["communication_data_type"] == "fp32"
    zero = settings["zero_optimization"]
    assert zero["stage"] == 3
    assert zero["offload_optimizer"] == {"device": "nvme", "nvme_path": "/scratch"}
    assert zero["reduce_bucket_size"] == 50_000_000


def test_what_the_run_does_not_decide_is_the_files(config_of):
    theirs = {
        "wall_clock_breakdown": True,
        "comms_logger": {"enabled": True},
        "zero_optimization": {"reduce_bucket_size": 7, "stage3_max_live_parameters": 9},
    }
    config = config_of(theirs, zero_stage=3)
    assert complaints(config) == []
    settings = made(config)
    assert settings["wall_clock_breakdown"] is True
    assert settings["comms_logger"] == {"enabled": True}
    zero = settings["zero_optimization"]
    assert (zero["stage"], zero["reduce_bucket_size"], zero["stage3_max_live_parameters"]) == (
        3,
        7,
        9,
    )


def test_what_agrees_or_leaves_it_to_the_run_is_taken(config_of):
    theirs = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "fp16": {"enabled": "auto", "loss_scale": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
    }
    config = config_of(theirs)
    assert complaints(config) == []
    settings = made(config)
    assert settings["train_batch_size"] == 2
    assert settings["fp16"] == {"enabled": False, "loss_scale": 0}
    assert settings["zero_optimization"]["reduce_bucket_size"] == 50_000_000
    assert "optimizer" not in settings  # The run makes its own.


def test_every_contradiction_is_named(config_of):
    theirs = {
        "train_batch_size": 1,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": False},
        "fp16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
    }
    ending = 'of the run, and remove this key or make it "auto"'
    assert complaints(config_of(theirs)) == [
        "its train_batch_size = 1: set train.global_batch_size or train.mini_batch_size " + ending,
        f"its gradient_clipping = 0.5: set optimizer.clip_grad {ending}",
        f"its bf16.enabled = False: set model.dtype {ending}",
        f"its fp16.enabled = True: set model.dtype {ending}",
        f"its zero_optimization.stage = 3: set deepspeed.zero_stage {ending}",
        "its zero_optimization.offload_param.device = 'cpu': set deepspeed.offload_param " + ending,
        "its optimizer = {'type': 'AdamW', 'params': {'lr': 1e-05}}: set optimizer of the run, and "
        "remove this key",
        "its scheduler = {'type': 'WarmupLR', 'params': {'warmup_num_steps': 10}}: set optimizer "
        "of the run, and remove this key",
    ]


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_file_that_is_no_json_object(text, config_of):
    (text,) = complaints(config_of(text))
    assert text.startswith("cannot be read (") and "name a JSON file of DeepSpeed's" in text


@pytest.mark.parametrize("section", ["bf16", "zero_optimization", "optimizer"])
def test_a_section_that_is_a_number(section, config_of):
    (text,) = complaints(config_of({section: 3}))
    assert text.startswith(f"its {section} = 3: ")


def test_a_run_is_refused_before_anything_is_loaded(config_of, tmp_path):
    path = config_of({"fp16": {"enabled": True}}).config_path
    settings = {"backend": "deepspeed", "deepspeed__config_path": path}
    assert complaint(GRPORun, GRPO, **settings) == (
        f"deepspeed.config_path = '{path}': its fp16.enabled = True: set model.dtype of the run, "
        'and remove this key or make it "auto"'
    )
    gone = str(tmp_path / "none.json")
    assert "none.json': cannot be read" in complaint(
        GRPORun, GRPO, backend="deepspeed", deepspeed__config_path=gone
    )


def test_bfloat16_needs_a_stage_that_adds_up_in_float32():
    settings = {"backend": "deepspeed", "model__dtype": "bfloat16", "deepspeed__zero_stage": 0}
    assert complaint(GRPORun, GRPO, **settings) == (
        "deepspeed.zero_stage = 0: DeepSpeed would add up gradients in bfloat16; take 1 or more, "
        "or model.dtype=float32"
    )
