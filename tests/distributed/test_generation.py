"""Sampling on live Megatron weights: the greedy text of transformers, the same on any layout."""

import math

import pytest
import torch

from rl_megatron.data.packing import pack_rollouts
from rl_megatron.interfaces.records import Prompt, Sampling
from tests.helpers.engine_contract import PROMPTS, STOPS, assert_same_rollouts, ids_of
from tests.helpers.megatron_job import LAYOUTS, make_backend, start
from tests.helpers.tiny_model import LLAMA3_ROPE, make_tiny_hf

VOCAB, TEMPERATURE = 131, 0.7
# Sharp enough that no two tokens tie for the first place.
MODELS = {
    "llama3": {"family": "llama", "rope": LLAMA3_ROPE},
    "qwen2": {"family": "qwen2"},
    "qwen3-tied": {"family": "qwen3", "tie": True},
}
EVERY_LAYOUT = ["tp2", "tp2-sp", "pp2", "dp2", "pp2-vpp2", "tp2-pp2-sp"]
# Unequal lengths, one of a single token, one beyond the positions Llama 3's scaling starts from.
LONG = Prompt(row_id=11, token_ids=tuple(3 + 7 * i % 120 for i in range(45)), text="long")
GREEDY = Sampling(temperature=0.0, max_response_tokens=24, stop_token_ids=STOPS)
SAMPLED = Sampling(temperature=TEMPERATURE, max_response_tokens=10, stop_token_ids=STOPS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {
        name: make_tiny_hf(tmp_path_factory.mktemp(name), layers=4, **settings)
        for name, settings in MODELS.items()
    }


def decode(ids):
    return " ".join(map(str, ids))


def make_engine(layout, folder, max_concurrent_sequences=64):
    from rl_megatron.rollout.megatron import MegatronEngine

    process = start(layout)
    backend = make_backend(folder, process, optimizer=None, temperature=TEMPERATURE)
    return MegatronEngine(backend.chunks, process, decode, max_concurrent_sequences), backend


def generate_job(layout, folder, prompts, sampling, group_size, at_once=64):
    """The rollouts, and the trainer's log-probs of their tokens."""
    engine, backend = make_engine(layout, folder, at_once)
    rollouts = engine.generate(prompts, sampling, group_size, seed=5)
    return rollouts, backend.logprobs(pack_rollouts(rollouts, STOPS))


def generate(pool, layout, *args):
    """The same on all ranks."""
    ranks = pool(LAYOUTS[layout].world_size).run(generate_job, layout, *args)
    assert all(rollouts == ranks[0][0] for rollouts, _ in ranks)
    return ranks[0]


@pytest.fixture(scope="module")
def greedy_text(folders):
    """What transformers generates, prompt by prompt."""
    from transformers import AutoModelForCausalLM

    found = {}
    for name, folder in folders.items():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        found[name] = []
        for prompt in [*PROMPTS, LONG]:
            ids = torch.tensor([prompt.token_ids])
            output = model.generate(
                ids,
                do_sample=False,
                max_new_tokens=GREEDY.max_response_tokens,
                eos_token_id=list(STOPS),
                pad_token_id=0,
            )
            found[name].append(tuple(output[0, ids.shape[1] :].tolist()))
    return found


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", ["tp1", *EVERY_LAYOUT])
def test_greedy_text_is_that_of_transformers(layout, model, folders, greedy_text, pool):
    rollouts, _ = generate(pool, layout, folders[model], [*PROMPTS, LONG], GREEDY, 1)
    assert ids_of(rollouts) == greedy_text[model]
    assert [r.text for r in rollouts] == [decode(ids) for ids in greedy_text[model]]
    assert len(set(map(len, greedy_text[model]))) > 1


@pytest.fixture(scope="module")
def sampled_on_one_rank(folders, pool):
    return generate(pool, "tp1", folders["qwen3-tied"], [*PROMPTS, LONG], SAMPLED, 4)[0]


# 3 at once: waves end in the middle of groups, and rows leave the cache at different times.
@pytest.mark.parametrize("at_once", [64, 3])
@pytest.mark.parametrize("layout", ["tp1", *EVERY_LAYOUT])
def test_samples_are_the_same_on_every_layout_and_scored_alike_by_the_trainer(
    layout, at_once, folders, sampled_on_one_rank, pool
):
    folder = folders["qwen3-tied"]
    rollouts, logprobs = generate(pool, layout, folder, [*PROMPTS, LONG], SAMPLED, 4, at_once)
    assert_same_rollouts(rollouts, sampled_on_one_rank)
    batch = pack_rollouts(rollouts, STOPS)
    assert (logprobs - batch.rollout_logprobs).abs().max() <= 2e-5
    assert {r.finish_reason for r in rollouts} == {"stop", "length"}


@pytest.mark.parametrize("layout", ["tp2-sp", "pp2-vpp2", "dp2"])
def test_fewer_requests_than_ranks_and_none_at_all(layout, folders, sampled_on_one_rank, pool):
    folder = folders["qwen3-tied"]
    rollouts, _ = generate(pool, layout, folder, [PROMPTS[2]], SAMPLED, 1)
    assert_same_rollouts(rollouts, [sampled_on_one_rank[8]])
    for nothing in pool(2).run(none_job, layout, folder):
        assert nothing == []


def none_job(layout, folder):
    return make_engine(layout, folder)[0].generate([], SAMPLED, 4, seed=0)


@pytest.mark.parametrize("layout", ["tp2-pp2-sp", "dp2"])
def test_shortest_and_longest_responses(layout, folders, pool):
    folder = folders["llama3"]
    wide_stops = tuple(range(60, VOCAB))
    free = Sampling(temperature=1.0, max_response_tokens=6, stop_token_ids=wide_stops)
    bound = Sampling(
        temperature=1.0, max_response_tokens=6, stop_token_ids=wide_stops, min_response_tokens=4
    )
    one = Sampling(temperature=1.0, max_response_tokens=1, stop_token_ids=())
    short, long, single = (
        pool(LAYOUTS[layout].world_size).run(lengths_job, layout, folder, sampling)[0]
        for sampling in (free, bound, one)
    )
    assert min(map(len, short)) < 4
    assert {len(ids) for ids in long} <= {4, 5, 6}
    assert all(token < 60 for ids in long for token in ids[:3])
    assert {len(ids) for ids in single} == {1}


def lengths_job(layout, folder, sampling):
    engine, _ = make_engine(layout, folder)
    rollouts = engine.generate(PROMPTS, sampling, 4, seed=0)
    assert all(math.isfinite(x) for r in rollouts for x in r.rollout_logprobs)
    return ids_of(rollouts)


def zero_weights_job(layout, folder):
    """Log-probs of the same prompts before and after all weights became 0."""
    engine, backend = make_engine(layout, folder)
    sampling = Sampling(temperature=1.0, max_response_tokens=4, stop_token_ids=())
    before = engine.generate(PROMPTS, sampling, 2, seed=0)
    with torch.no_grad():
        for chunk in backend.chunks:
            for parameter in chunk.parameters():
                parameter.zero_()
    engine.load_weights(backend.named_weights(), policy_version=1)
    after = engine.generate(PROMPTS, sampling, 2, seed=0)
    return [[x for r in rollouts for x in r.rollout_logprobs] for rollouts in (before, after)]


@pytest.mark.parametrize("layout", ["tp1", "tp2-pp2"])
def test_ro_05_nothing_is_left_of_weights_that_became_zero(layout, folders, pool):
    ranks = pool(LAYOUTS[layout].world_size).run(zero_weights_job, layout, folders["llama3"])
    for before, after in ranks:
        assert max(abs(x + math.log(VOCAB)) for x in before) > 1
        assert after == pytest.approx([-math.log(VOCAB)] * len(after), abs=1e-6)
