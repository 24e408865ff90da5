"""The text of --help."""

import pytest

from rl_megatron.config import DPORun, GRPORun, SFTRun
from rl_megatron.config.help import help_text
from rl_megatron.config.schema import fields


@pytest.mark.parametrize("run_class", [SFTRun, DPORun, GRPORun])
@pytest.mark.parametrize("width", [60, 100])
def test_every_setting_is_explained_within_the_width(run_class, width):
    text = help_text(run_class, "train.py", "Trains.", width)
    sharing = ("data.eval.", "evaluation.data.")  # listed once, as data.train
    for key, field in fields(run_class):
        assert field.description, f"{key} has no description"
        assert f"  {key}: " in text or f"\n{key}: " in text or key.startswith(sharing), key
    body = text.split("settings:\n")[1]
    assert max(map(len, body.splitlines())) <= width


def test_a_setting_has_type_default_and_meaning():
    text = help_text(GRPORun, "train.py", "Trains.")
    assert (
        "  optimizer.lr: number > 0  (default 1e-06)\n"
        "      Learning rate at the end of the warm-up.\n" in text
    )
    assert "  model.dtype: float32 | bfloat16  (default 'float32')\n" in text
    assert "  cluster.gpus_per_node: int > 0 | null  (default null)\n" in text
    assert "  optimizer.adam_beta2: number >= 0 and < 1  (default 0.999)\n" in text
    assert "  rollout.stop_token_ids: list of int >= 0  (default [])\n" in text
    assert "  train.num_rollout_batches: int > 0  (required)\n" in text
    assert "  output_dir: text\n" in text
    assert "  rewards[].name=answer_tag: 1 where the text" in text
    assert "    rewards[].buffer_tokens: int > 0  (required)\n" in text
    assert "  algorithm.kl_ctrl.type=adaptive: " in text


def test_a_section_is_listed_once():
    text = help_text(GRPORun, "train.py", "Trains.")
    assert text.count("prompt_key: text") == 1
    assert "data.eval: Held-out rows.\n  settings as in data.train\n" in text
    assert "  settings as in rewards\n" in text


def test_usage_comes_first():
    assert help_text(SFTRun, "train.py", "Trains.").startswith(
        "usage: train.py CONFIG.yaml [key.path=value ...] [--print-config] [--help]\n\nTrains.\n"
    )
