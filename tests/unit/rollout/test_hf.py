"""The hf engine: the contract of all engines, transformers' greedy text, nobody's defaults."""

import json

import pytest
import torch

from rl_megatron.backends.torch import TorchBackend
from rl_megatron.data.packing import pack_rollouts
from rl_megatron.errors import CheckpointError, ConfigError, NumericsError
from rl_megatron.interfaces.records import Prompt, Sampling
from rl_megatron.models.transformers_bare import bare_transformers_model
from rl_megatron.models.transformers_model import (
    as_we_run_it,
    load_transformers_model,
    named_weights,
)
from rl_megatron.parallel.process import start_data_parallel
from rl_megatron.rollout.hf import HFEngine
from tests.helpers.architectures import ARCHITECTURES, make_architecture, tiny_architecture
from tests.helpers.backend_contract import CLOSE, OPTIMIZER, TEMPERATURE, WHOLE
from tests.helpers.engine_contract import (
    ENGINE_CHECKS,
    PROMPTS,
    STOPS,
    EngineSetup,
    assert_same_rollouts,
    ids_of,
    make_sampling,
)
from tests.helpers.oracle import batch_logprobs
from tests.helpers.tiny_model import LLAMA3_ROPE, make_tiny_hf


@pytest.fixture(scope="module")
def process():
    return start_data_parallel()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_hf(tmp_path_factory.mktemp("llama"), "llama", rope=LLAMA3_ROPE)


def decode(ids):
    return "|".join(map(str, ids))


def load(folder, dtype=torch.float32):
    return load_transformers_model(folder, dtype, torch.device("cpu"))


def bare(folder):
    return bare_transformers_model(folder, torch.float32, torch.device("cpu"))


def make(folder, process, dtype=torch.float32, at_once=64):
    return HFEngine(load(folder, dtype), process, decode, at_once)


@pytest.mark.parametrize("owns_model", [False, True])
@pytest.mark.parametrize("check", ENGINE_CHECKS, ids=lambda check: check.__name__)
def test_contract(check, owns_model, folder, process):
    def make_both(max_concurrent_sequences):
        policy = TorchBackend(folder, process, WHOLE, TEMPERATURE, optimizer=OPTIMIZER)
        model = bare(folder) if owns_model else policy.model
        engine = HFEngine(model, process, decode, max_concurrent_sequences, owns_model)
        engine.wake()
        engine.load_weights(policy.named_weights(), policy_version=0)
        return engine, policy

    check(EngineSetup(folder, make_both))


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", *ARCHITECTURES])
def test_greedy_text_is_that_of_transformers(family, process, tmp_path):
    folder = (make_architecture if family in ARCHITECTURES else make_tiny_hf)(tmp_path, family)
    rollouts = make(folder, process).generate(PROMPTS, make_sampling(0.0), 1, seed=0)
    model = load(folder)
    for prompt, rollout in zip(PROMPTS, rollouts, strict=True):
        ids = torch.tensor([prompt.token_ids])
        expected = model.generate(
            ids, do_sample=False, max_new_tokens=8, eos_token_id=list(STOPS), pad_token_id=0
        )
        assert rollout.response_ids == tuple(expected[0, len(prompt.token_ids) :].tolist())
        assert rollout.text == decode(rollout.response_ids)


def test_ro_03_nothing_is_taken_from_generation_config(folder, process, tmp_path):
    with_defaults = make_tiny_hf(tmp_path, "llama", rope=LLAMA3_ROPE)
    defaults = {
        "repetition_penalty": 1.25,
        "top_k": 15,
        "temperature": 0.7,
        "top_p": 0.8,
        "do_sample": True,
        "eos_token_id": list(range(3, 131)),
        "max_new_tokens": 2,
    }
    (with_defaults / "generation_config.json").write_text(json.dumps(defaults))
    assert load(with_defaults).generation_config.top_k == 15
    sampling = make_sampling(1.0)
    expected = make(folder, process).generate(PROMPTS, sampling, 4, seed=0)
    assert_same_rollouts(make(with_defaults, process).generate(PROMPTS, sampling, 4, 0), expected)


def test_ro_09_a_short_prompt_beside_a_long_one_sees_no_padding(folder, process):
    engine = make(folder, process)
    short = Prompt(row_id=1, token_ids=(50, 60), text="")
    long = Prompt(row_id=2, token_ids=tuple(range(3, 103)), text="")
    sampling = make_sampling(stop_token_ids=(), max_response_tokens=12)
    alone = engine.generate([short], sampling, 2, seed=0)
    beside = engine.generate([long, short], sampling, 2, seed=0)
    assert_same_rollouts(beside[2:], alone)


def test_ro_09_positions_count_real_tokens_only(folder, process):
    # Rotary positions are relative, so a shift of a whole row would not show in any log-prob.
    seen = []
    model = load(folder)
    engine = HFEngine(model, process, decode, 64)
    model.base_model.register_forward_pre_hook(
        lambda _, args, more: seen.append((more["attention_mask"], more["position_ids"])),
        with_kwargs=True,
    )
    prompts = [
        Prompt(row_id=0, token_ids=(50, 51, 52), text=""),
        Prompt(row_id=1, token_ids=(60, 61, 62, 63, 64), text=""),
    ]
    sampling = make_sampling(stop_token_ids=(), max_response_tokens=3)
    engine.generate(prompts, sampling, 1, seed=0)
    assert [mask[0].tolist() for mask, _ in seen] == [
        [0, 0, 1, 1, 1], [0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1]
    ]  # fmt: skip
    positions = torch.cat([position for _, position in seen], dim=1)
    assert positions[0, 2:].tolist() == [0, 1, 2, 3, 4]
    assert positions[1].tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_samples_follow_the_distribution_of_the_model(folder, process):
    engine = make(folder, process, at_once=1000)
    sampling = Sampling(temperature=0.7, max_response_tokens=1, stop_token_ids=())
    number = 4000
    rollouts = engine.generate(PROMPTS[:1], sampling, group_size=number, seed=0)
    counts = torch.bincount(torch.tensor([r.response_ids[0] for r in rollouts]), minlength=131)
    with torch.no_grad():
        logits = load(folder)(torch.tensor([PROMPTS[0].token_ids])).logits[0, -1]
    expected = number * (logits / 0.7).double().softmax(0)
    # Rare tokens are put together, so that every cell is expected at least five times.
    rare = expected < 5
    cells = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    assert len(cells) > 15
    chi_square = float(((cells - expected) ** 2 / expected).sum())
    # Mean and variance of a chi-square are d and 2 d; four standard deviations.
    freedom = len(cells) - 1
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5


def test_bfloat16_logprobs_are_those_of_the_trainer(folder, process):
    policy = TorchBackend(folder, process, WHOLE, 1.0, torch.bfloat16)
    engine = HFEngine(policy.model, process, decode, 64)
    batch = pack_rollouts(engine.generate(PROMPTS, make_sampling(1.0), 4, seed=0))
    difference = (policy.logprobs(batch) - batch.rollout_logprobs).abs()
    # Activations are rounded to 8 bits; logits and log-probs are not.
    assert difference.max() < 0.15
    assert difference[batch.response_mask].mean() < 0.03


def test_weights_of_a_model_of_its_own_are_replaced_as_a_whole(folder, process, tmp_path):
    engine = HFEngine(bare(folder), process, decode, 64, owns_model=True)
    engine.wake()
    engine.load_weights(named_weights(load(folder)), policy_version=3)
    engine.generate(PROMPTS, make_sampling(), 1, seed=0)
    other = make_tiny_hf(tmp_path, "llama", rope=LLAMA3_ROPE, seed=1)
    engine.load_weights(named_weights(load(other)), policy_version=4)
    found = engine.generate(PROMPTS, make_sampling(), 2, seed=0)
    assert_same_rollouts(found, make(other, process).generate(PROMPTS, make_sampling(), 2, 0))
    assert {r.policy_version for r in found} == {4}
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        some = [(n, w) for n, w in named_weights(load(other)) if n != "lm_head.weight"]
        engine.load_weights(iter(some), policy_version=5)


def test_the_trainers_own_weights_are_not_asked_for(folder, process):
    def weights():
        raise AssertionError("asked")
        yield

    engine = make(folder, process)
    engine.wake()
    engine.load_weights(weights(), policy_version=2)
    engine.sleep()
    rollouts = engine.generate(PROMPTS, make_sampling(), 1, seed=0)
    assert {r.policy_version for r in rollouts} == {2}


def test_weights_that_are_not_finite_are_reported(folder, process):
    model = load(folder)
    with torch.no_grad():
        model.model.norm.weight[3] = torch.nan
    for temperature in (0.0, 1.0):
        with pytest.raises(NumericsError, match="logits are not finite"):
            HFEngine(model, process, decode, 64).generate(
                PROMPTS, make_sampling(temperature), 1, seed=0
            )


def test_no_prompts_give_no_rollouts(folder, process):
    assert ids_of(make(folder, process).generate([], make_sampling(), 4, seed=0)) == []


@pytest.mark.parametrize("model_type", ["lfm2", "mamba2", "gpt_oss", "opt", "llama4_text"])
def test_logprobs_of_other_caches_are_those_of_the_model(model_type, process):
    model = as_we_run_it(tiny_architecture(model_type))
    engine = HFEngine(model, process, decode, 3)
    batch = pack_rollouts(engine.generate(PROMPTS, make_sampling(), 4, seed=0))
    expected = batch_logprobs(model, batch, TEMPERATURE).detach()
    torch.testing.assert_close(batch.rollout_logprobs, expected, **CLOSE)


@pytest.mark.parametrize(
    "model_type, said",
    [
        ("rwkv", "a state of its own in place"),
        ("mamba", "other log-probs with transformers' cache"),
    ],
)
def test_what_cannot_be_sampled_from_is_refused_at_once(model_type, said, process):
    model = as_we_run_it(tiny_architecture(model_type))
    with pytest.raises(
        ConfigError, match=rf"rollout.engine = 'hf': model_type {model_type} .*{said}"
    ):
        HFEngine(model, process, decode, 64)
