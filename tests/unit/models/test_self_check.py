"""What a model may not be, found with two short sequences before training."""

import pytest
import torch

from rl_megatron.errors import CheckpointError, ConfigError
from rl_megatron.models import transformers_head
from rl_megatron.models.self_check import check_policy
from rl_megatron.models.transformers_model import as_we_run_it
from rl_megatron.models.transformers_policy import TransformersPolicy
from tests.helpers.architectures import ARCHITECTURES, tiny_architecture
from tests.helpers.tiny_model import make_tiny_hf

CPU = torch.device("cpu")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def policy_of(model_type, dtype=torch.float32):
    return TransformersPolicy(as_we_run_it(tiny_architecture(model_type)).to(dtype), 0.7)


@DTYPES
@pytest.mark.parametrize("model_type", [*ARCHITECTURES, "falcon", "gpt_oss", "opt", "llama4_text"])
def test_packed_sequences_are_fine(model_type, dtype):
    check_policy(policy_of(model_type, dtype), True, CPU)


@DTYPES
@pytest.mark.parametrize("model_type", ["bloom", "lfm2", "mamba2", "rwkv"])
def test_sequences_that_see_each_other_may_be_padded(model_type, dtype):
    policy = policy_of(model_type, dtype)
    check_policy(policy, False, CPU)
    said = rf"^train.packed = true: sequences of model_type {model_type} see each other when packed"
    with pytest.raises(ConfigError, match=said):
        check_policy(policy, True, CPU)


def test_code_that_fails_on_a_packed_row_is_named():
    policy = policy_of("gpt2")
    run = policy.forward

    def fails(batch, packed=False):
        if packed:
            raise TypeError("no such mask")
        return run(batch)

    said = r"code of model_type gpt2 takes no packed sequences \(TypeError: no such mask\); set"
    with pytest.raises(ConfigError, match=said):
        check_policy(policy, True, CPU, fails)


@DTYPES
def test_a_model_that_is_not_causal_is_refused(dtype):
    with pytest.raises(CheckpointError, match="model_type bert: a sequence sees what stands to"):
        check_policy(policy_of("bert", dtype), False, CPU)


@DTYPES
def test_a_head_that_does_what_is_not_known_is_refused(dtype, monkeypatch):
    monkeypatch.setattr(transformers_head, "_SCALES", {})
    with pytest.raises(CheckpointError, match="model_type cohere: its head does more than a"):
        check_policy(policy_of("cohere", dtype), True, CPU)


@DTYPES
@pytest.mark.parametrize("packed", [False, True])
def test_reward_models_are_fine(packed, dtype, tmp_path):
    from transformers import AutoModelForSequenceClassification

    folder = make_tiny_hf(tmp_path, "qwen3", scalar_head=True)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=dtype)
    check_policy(TransformersPolicy(as_we_run_it(model)), packed, CPU)
