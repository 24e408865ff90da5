"""Before the first step the policy is its reference: what is exact then, and what stays exact."""

import math

import pytest
import torch

from rl_megatron.data.packing import MicroBatching
from rl_megatron.losses import dpo_objective, grpo_objective, sft_objective
from tests.helpers.backend_contract import make_batch
from tests.helpers.megatron_job import (
    LAYOUTS,
    bits_of,
    make_backend,
    parameters_of,
    start,
)
from tests.helpers.tiny_model import make_tiny_hf


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_hf(tmp_path_factory.mktemp("qwen3"), "qwen3", tie=True)


def _models(layout, folder, placement, size):
    """The policy and a reference with the same weights."""
    from rl_megatron.backends.megatron import SwappedReference

    process, split = start(layout), MicroBatching(micro_batch_size=size)
    policy = make_backend(folder, process, split)
    if placement == "swapped":
        return policy, SwappedReference(policy, policy)
    return policy, make_backend(folder, process, split, optimizer=None)


def dpo_job(layout, folder, placement, size):
    """Metrics of the first two steps; whether the reference stayed what it was, to the bit."""
    policy, reference = _models(layout, folder, placement, size)
    batch = make_batch(paired=True)
    at_start = reference.logprobs(batch)
    batch = batch.with_fields(ref_logprobs=at_start)
    metrics = [policy.train_step(batch, dpo_objective(beta=0.1), lr=1e-3) for _ in range(2)]
    moved = not torch.equal(policy.logprobs(batch), at_start)
    return metrics, moved, torch.equal(reference.logprobs(batch), at_start)


def grpo_job(layout, folder, placement, size):
    """Metrics of the first step, with the KL in the loss."""
    policy, reference = _models(layout, folder, placement, size)
    batch = make_batch()
    batch = batch.with_fields(
        ref_logprobs=reference.logprobs(batch), old_logprobs=policy.logprobs(batch)
    )
    objective = grpo_objective(max_response_tokens=8, use_kl_loss=True, kl_loss_coef=0.1)
    return policy.train_step(batch, objective, lr=1e-3)


# The one nearest to the test changes least often: new groups cost time.
BY_LAYOUT = pytest.mark.parametrize("layout", ["tp1", "tp2-sp", "pp2", "dp2"])
BY_PLACEMENT = pytest.mark.parametrize("placement", ["resident", "swapped"])
BY_SIZE = pytest.mark.parametrize("size", [1, 2])


@BY_SIZE
@BY_PLACEMENT
@BY_LAYOUT
def test_dpo_14_loss_is_ln_2_and_the_reference_does_not_move(layout, placement, size, folder, pool):
    world_size = LAYOUTS[layout].world_size
    for metrics, moved, same in pool(world_size).run(dpo_job, layout, folder, placement, size):
        assert metrics[0]["loss/dpo"] == pytest.approx(math.log(2), abs=1e-9)
        assert metrics[0]["rewards/margins"] == 0.0
        assert metrics[0]["rewards/chosen"] == metrics[0]["rewards/rejected"] == 0.0
        assert metrics[1]["rewards/margins"] > 0.01
        assert moved
        assert same


@BY_PLACEMENT
@BY_LAYOUT
def test_grpo_ratio_is_1_and_kl_0(layout, placement, folder, pool):
    for metrics in pool(LAYOUTS[layout].world_size).run(grpo_job, layout, folder, placement, 2):
        assert metrics["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-6)
        assert metrics["policy/ratio_max"] == pytest.approx(1.0, abs=1e-6)
        for name in ("loss/kl", "policy/kl_to_reference", "policy/approx_kl"):
            assert metrics[name] == pytest.approx(0.0, abs=1e-6)
        assert metrics["policy/clip_fraction_low"] == metrics["policy/clip_fraction_high"] == 0.0


def swap_job(layout, folder):
    """A policy trained away from its reference, with and without reference passes in between."""
    from rl_megatron.backends.megatron import SwappedReference

    batch, outcomes = make_batch(), []
    for asks in (False, True):
        policy = make_backend(folder, start(layout))
        reference = SwappedReference(policy, policy)
        places = [p.data_ptr() for chunk in policy.chunks for p in chunk.parameters()]
        for _ in range(3):
            policy.train_step(batch, sft_objective(), lr=1e-3)
            if asks:
                before = parameters_of(policy)
                assert not torch.equal(reference.logprobs(batch), policy.logprobs(batch))
                assert all(map(torch.equal, bits_of(before), bits_of(parameters_of(policy))))
        assert places == [p.data_ptr() for chunk in policy.chunks for p in chunk.parameters()]
        outcomes.append(parameters_of(policy))
    return all(map(torch.equal, *outcomes))


@BY_LAYOUT
def test_a_swapped_reference_leaves_the_policy_as_it_was_to_the_bit(layout, folder, pool):
    assert all(pool(LAYOUTS[layout].world_size).run(swap_job, layout, folder))
