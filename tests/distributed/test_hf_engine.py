"""The hf engine on several ranks: each samples its share, and all have what one rank would have."""

import pytest
import torch

from rl_megatron.backends.torch import TorchBackend
from rl_megatron.errors import CheckpointError
from rl_megatron.interfaces.records import Prompt
from rl_megatron.models.transformers_bare import bare_transformers_model
from rl_megatron.models.transformers_model import load_transformers_model, named_weights
from rl_megatron.parallel.layout import Layout
from rl_megatron.parallel.process import Process, start_data_parallel
from rl_megatron.rollout.hf import HFEngine
from tests.helpers import engine_contract
from tests.helpers.backend_contract import OPTIMIZER, TEMPERATURE, WHOLE
from tests.helpers.engine_contract import (
    ENGINE_CHECKS,
    PROMPTS,
    EngineSetup,
    assert_same_rollouts,
    make_sampling,
)
from tests.helpers.tiny_model import LLAMA3_ROPE, make_tiny_hf

LONG = Prompt(row_id=11, token_ids=tuple(3 + 7 * i % 120 for i in range(45)), text="long")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_hf(tmp_path_factory.mktemp("llama"), "llama", rope=LLAMA3_ROPE)


def decode(ids):
    return "|".join(map(str, ids))


def start():
    """This rank for itself, and as one of the data-parallel ranks of the job."""
    process = start_data_parallel()
    return Process(Layout(), process.rank, process.device), process


def contract_job(check, folder, owns_model):
    """The policy is whole on every rank and makes the same steps there."""
    alone, process = start()

    def make(max_concurrent_sequences):
        policy = TorchBackend(folder, alone, WHOLE, TEMPERATURE, optimizer=OPTIMIZER)
        model = policy.model
        if owns_model:
            model = bare_transformers_model(folder, torch.float32, process.device)
        engine = HFEngine(model, process, decode, max_concurrent_sequences, owns_model)
        engine.wake()
        engine.load_weights(policy.named_weights(), policy_version=0)
        return engine, policy

    getattr(engine_contract, check)(EngineSetup(folder, make))


@pytest.mark.parametrize("check", [check.__name__ for check in ENGINE_CHECKS])
@pytest.mark.parametrize("owns_model", [False, True])
def test_engine_contract(owns_model, check, folder, pool):
    pool(2).run(contract_job, check, folder, owns_model)


def generate_job(folder, prompts, group_size, at_once):
    """The rollouts, and the forward passes that this rank made for them."""
    _, process = start()
    model = load_transformers_model(folder, torch.float32, process.device)
    engine = HFEngine(model, process, decode, at_once)
    passes = []
    model.base_model.register_forward_pre_hook(lambda *_: passes.append(1))
    return engine.generate(prompts, make_sampling(), group_size, seed=3), len(passes)


# 3 at once: waves of a rank end in the middle of groups.
@pytest.mark.parametrize("at_once", [64, 3])
@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_have_the_rollouts_of_one(ranks, at_once, folder, pool):
    # 5 x 4 requests on 3 ranks: shares of 7, 7 and 6.
    prompts = [*PROMPTS, LONG]
    expected, _ = pool(1).run(generate_job, folder, prompts, 4, 64)[0]
    found = pool(ranks).run(generate_job, folder, prompts, 4, at_once)
    for rollouts, passes in found:
        assert rollouts == found[0][0]
        assert_same_rollouts(rollouts, expected)
        assert passes > 0


@pytest.mark.parametrize("number", [0, 1, 2])
def test_ranks_without_a_request_of_their_own(number, folder, pool):
    expected, _ = pool(1).run(generate_job, folder, PROMPTS[:number], 1, 64)[0]
    found = pool(3).run(generate_job, folder, PROMPTS[:number], 1, 64)
    for rollouts, _ in found:
        assert_same_rollouts(rollouts, expected)
    assert [passes > 0 for _, passes in found] == [rank < number for rank in range(3)]


def wrong_weights_job(folder):
    _, process = start()
    model = bare_transformers_model(folder, torch.float32, process.device)
    engine = HFEngine(model, process, decode, 64, owns_model=True)
    engine.wake()
    weights = dict(named_weights(load_transformers_model(folder, torch.float32, process.device)))
    weights["model.norm.weight"] = torch.ones(3)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has shape \[3\]"):
        engine.load_weights(iter(weights.items()), policy_version=1)


def test_weights_of_another_model_are_refused_on_all_ranks(folder, pool):
    pool(2).run(wrong_weights_job, folder)
