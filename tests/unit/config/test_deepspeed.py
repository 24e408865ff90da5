"""A user's own DeepSpeed JSON beside what the run decides."""

import json

import pytest

from rl_megatron.config.deepspeed import merge_settings
from rl_megatron.errors import ConfigError

OURS = {
    "train_batch_size": 2,
    "train_micro_batch_size_per_gpu": 1,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True, "check_grad_overflow": True},
    "fp16": {"enabled": False},
    "zero_optimization": {"stage": 3, "offload_param": {"device": "none"}},
}
DEFAULTS = {"zero_optimization": {"reduce_bucket_size": 50}}


@pytest.fixture
def file_of(tmp_path):
    def write(settings):
        path = tmp_path / "ds.json"
        path.write_text(settings if isinstance(settings, str) else json.dumps(settings))
        return str(path)

    return write


def test_without_a_file_the_run_decides():
    merged = merge_settings(None, OURS, DEFAULTS)
    assert merged["zero_optimization"] == {**OURS["zero_optimization"], "reduce_bucket_size": 50}
    assert {**merged, "zero_optimization": None} == {**OURS, "zero_optimization": None}


def test_what_the_run_does_not_decide_is_the_files(file_of):
    theirs = {
        "wall_clock_breakdown": True,
        "comms_logger": {"enabled": True},
        "zero_optimization": {"reduce_bucket_size": 7, "stage3_max_live_parameters": 9},
    }
    merged = merge_settings(file_of(theirs), OURS, DEFAULTS)
    assert merged["wall_clock_breakdown"] is True
    assert merged["comms_logger"] == {"enabled": True}
    assert merged["zero_optimization"] == {
        "stage": 3,
        "offload_param": {"device": "none"},
        "reduce_bucket_size": 7,
        "stage3_max_live_parameters": 9,
    }


def test_what_agrees_or_leaves_it_to_the_run_is_taken(file_of):
    theirs = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "fp16": {"enabled": "auto", "loss_scale": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
    }
    merged = merge_settings(file_of(theirs), OURS, DEFAULTS)
    assert merged["train_batch_size"] == 2
    assert merged["fp16"] == {"enabled": False, "loss_scale": 0}
    assert merged["zero_optimization"]["reduce_bucket_size"] == 50
    assert "optimizer" not in merged  # The run makes its own.


def test_every_contradiction_is_named(file_of):
    theirs = {
        "train_batch_size": 2,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": False},
        "fp16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}},
    }
    path = file_of(theirs)
    with pytest.raises(ConfigError) as error:
        merge_settings(path, OURS, DEFAULTS)
    header, *lines = str(error.value).splitlines()
    assert header == f"deepspeed.config_path {path} contradicts the run:"
    ending = 'of the run, and remove this key or make it "auto"'
    assert lines == [
        f"  train_batch_size = 2: set train.global_batch_size or train.mini_batch_size {ending}",
        f"  gradient_clipping = 0.5: set optimizer.clip_grad {ending}",
        f"  bf16.enabled = False: set model.dtype {ending}",
        f"  fp16.enabled = True: set model.dtype {ending}",
        f"  zero_optimization.stage = 2: set deepspeed.zero_stage {ending}",
        f"  zero_optimization.offload_param.device = 'cpu': set deepspeed.offload_param {ending}",
        "  optimizer = {'type': 'AdamW', 'params': {'lr': 1e-05}}: set optimizer of the run, and "
        "remove this key",
        "  scheduler = {'type': 'WarmupLR', 'params': {'warmup_num_steps': 10}}: set optimizer of "
        "the run, and remove this key",
    ]


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_file_that_is_no_json_object(text, file_of):
    with pytest.raises(ConfigError, match="deepspeed.config_path .*ds.json"):
        merge_settings(file_of(text), OURS, DEFAULTS)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read .*; name a JSON file, or remove this"):
        merge_settings(str(tmp_path / "none.json"), OURS, DEFAULTS)


@pytest.mark.parametrize("section", ["bf16", "zero_optimization"])
def test_a_section_that_is_none(section, file_of):
    with pytest.raises(ConfigError, match=f"  {section} = 3: "):
        merge_settings(file_of({section: 3}), OURS, DEFAULTS)
