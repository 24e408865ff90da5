"""Files of a language model become those of a reward model that transformers reads the same way."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from rl_megatron.checkpoint.hf_files import carry_hf_files
from rl_megatron.checkpoint.hf_reward import become_reward_model
from rl_megatron.models.families import FAMILIES, read_shape, weight_rules
from tests.helpers.tiny_model import CONFIGS, EOS, PAD, make_tiny_hf


def change(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tie", [False, True])
def test_config_and_record_are_those_of_transformers(family, tie, tmp_path):
    source = make_tiny_hf(tmp_path / "source", family, tie=tie, dtype=torch.bfloat16)
    carry_hf_files(source, tmp_path / "hf")
    become_reward_model(tmp_path / "hf")
    shape = read_shape(tmp_path / "hf")
    assert shape.scalar_head and not read_shape(source).scalar_head
    config = AutoConfig.from_pretrained(tmp_path / "hf")
    assert config.num_labels == 1
    kind = type(AutoModelForSequenceClassification.from_config(config)).__name__
    assert config.architectures == [kind]
    assert isinstance(config, CONFIGS[family])
    tensors = json.loads((tmp_path / "hf/conversion.json").read_text())["tensors"]
    names = {name for rule in weight_rules(shape) for name in rule.hf_names}
    assert tensors.keys() == names and "score.weight" in names and "lm_head.weight" not in names
    assert tensors["score.weight"] == {"dtype": "BF16", "shape": [1, 32]}


def test_a_reward_model_stays_as_it_is(tmp_path):
    folder = make_tiny_hf(tmp_path, scalar_head=True)
    before = (folder / "config.json").read_bytes()
    become_reward_model(folder)
    assert (folder / "config.json").read_bytes() == before


@pytest.mark.parametrize(
    ("config", "tokenizer", "expected"),
    [
        # The usual ones: a padding token of its own; none; one that ends responses, too.
        ({"pad_token_id": 7}, {}, 7),
        ({"pad_token_id": None}, {}, PAD),
        ({"pad_token_id": EOS}, {}, PAD),
        ({"pad_token_id": EOS}, {"pad_token": "<eos>"}, None),
        ({"pad_token_id": EOS}, {"pad_token": "<eos>", "unk_token": "<pad>"}, PAD),
        ({"pad_token_id": 9, "eos_token_id": [EOS, 9]}, {"pad_token": None}, None),
        ({"pad_token_id": 5}, {"eos_token": {"content": "<eos>"}}, 5),
    ],
)
def test_the_padding_token_ends_no_response(config, tokenizer, expected, tmp_path):
    folder = make_tiny_hf(tmp_path)
    (folder / "generation_config.json").unlink(missing_ok=True)
    change(folder / "config.json", **config)
    change(folder / "tokenizer_config.json", **tokenizer)
    become_reward_model(folder)
    assert json.loads((folder / "config.json").read_text())["pad_token_id"] == expected


def test_what_generation_stops_at_is_no_padding(tmp_path):
    folder = make_tiny_hf(tmp_path)
    change(folder / "config.json", pad_token_id=7)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, 7, PAD]}))
    become_reward_model(folder)
    assert json.loads((folder / "config.json").read_text())["pad_token_id"] is None
