"""The Megatron backend and engine under the contracts of all backends and engines, and what is
theirs alone: broken weights, memory given back, bf16, recomputation."""

import math

import pytest
import torch

from rl_megatron.backends.offload import Offloaded
from rl_megatron.data.packing import MicroBatching
from rl_megatron.errors import NumericsError
from rl_megatron.losses import grpo_objective, sft_objective
from tests.helpers import backend_contract, engine_contract
from tests.helpers.backend_contract import (
    BACKEND_CHECKS,
    OPTIMIZER,
    BackendSetup,
    make_batch,
    weights_of,
)
from tests.helpers.engine_contract import ENGINE_CHECKS, EngineSetup
from tests.helpers.megatron_job import (
    LAYOUTS,
    bits_of,
    gradients_of,
    make_backend,
    parameters_of,
    start,
)
from tests.helpers.tiny_model import LLAMA3_ROPE, make_tiny_hf

TWO_RANKS = ["tp2-sp", "pp2", "dp2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_hf(tmp_path_factory.mktemp("llama"), "llama", rope=LLAMA3_ROPE)


def backend_contract_job(layout, check, folder, scratch):
    process = start(layout)

    def empty_folder(name):
        if process.is_main:
            (scratch / name).mkdir()
        process.barrier()
        return scratch / name

    def make(micro_batching, optimizer):
        return make_backend(folder, process, micro_batching, optimizer)

    getattr(backend_contract, check)(BackendSetup(folder, make, empty_folder))


def engine_contract_job(layout, check, folder):
    from rl_megatron.rollout.megatron import MegatronEngine

    def make(max_concurrent_sequences):
        process = start(layout)
        policy = make_backend(folder, process)
        engine = MegatronEngine(
            policy.chunks, process, lambda ids: "|".join(map(str, ids)), max_concurrent_sequences
        )
        return engine, policy

    getattr(engine_contract, check)(EngineSetup(folder, make))


@pytest.mark.parametrize("check", [check.__name__ for check in BACKEND_CHECKS])
@pytest.mark.parametrize("layout", ["tp1", *TWO_RANKS])
def test_backend_contract(layout, check, folder, pool, tmp_path):
    pool(LAYOUTS[layout].world_size).run(backend_contract_job, layout, check, folder, tmp_path)


@pytest.mark.parametrize("check", [check.__name__ for check in ENGINE_CHECKS])
@pytest.mark.parametrize("layout", ["tp1", "tp2-sp", "pp2"])
def test_engine_contract(layout, check, folder, pool):
    pool(LAYOUTS[layout].world_size).run(engine_contract_job, layout, check, folder)


def broken_weight_job(layout, folder, broken_rank):
    """One NaN in one weight of one rank: what every rank is told, and whether it changed."""
    process = start(layout)
    backend = make_backend(folder, process)
    backend.train_step(make_batch(), sft_objective(), lr=1e-3)
    if process.rank == broken_rank:
        with torch.no_grad():
            next(iter(backend.chunks[0].decoder.parameters())).view(-1)[3] = math.nan
    before = parameters_of(backend)
    with pytest.raises(NumericsError, match="weights are as before"):
        backend.train_step(make_batch(), sft_objective(), lr=1e-3)
    return all(map(torch.equal, bits_of(before), bits_of(parameters_of(backend))))


@pytest.mark.parametrize("broken_rank", [0, 1])
@pytest.mark.parametrize("layout", TWO_RANKS)
def test_a_broken_weight_stops_the_step_on_all_ranks(layout, broken_rank, folder, pool):
    assert all(pool(2).run(broken_weight_job, layout, folder, broken_rank))


def settings_job(layout, folder, scratch):
    """Weights after a step of a run that goes on with another weight decay than the saved one."""
    process = start(layout)
    if process.is_main:
        scratch.mkdir()
    process.barrier()
    make_backend(folder, process).save(scratch)
    found = []
    for decay in (0.5, 0.0):
        backend = make_backend(
            folder, process, optimizer=OPTIMIZER.model_copy(update={"weight_decay": decay})
        )
        backend.load(scratch)
        start_weights = weights_of(backend)
        backend.train_step(make_batch(), sft_objective(), lr=1e-2)
        found.append(weights_of(backend))
    return start_weights, *found


@pytest.mark.parametrize("layout", ["tp1", "dp2"])
def test_settings_of_the_run_win_over_those_of_the_checkpoint(layout, folder, pool, tmp_path):
    ranks = pool(LAYOUTS[layout].world_size).run(settings_job, layout, folder, tmp_path / "saved")
    at_start, decayed, plain = ranks[0]
    for name, value in at_start.items():
        # Matrices alone are pulled towards 0.
        expected = 1e-2 * 0.5 * value if value.dim() > 1 else torch.zeros_like(value)
        torch.testing.assert_close(
            plain[name] - decayed[name], expected, atol=1e-6, rtol=1e-3, msg=name
        )


def offload_job(layout, folder, dtype):
    """Parameters after three steps, without and with everything given back in between."""
    outcomes = []
    for moves in (False, True):
        backend = make_backend(folder, start(layout), dtype=dtype)
        for _ in range(3):
            backend.train_step(make_batch(), sft_objective(), lr=1e-2)
            if moves:
                tensors = list(backend._device_tensors())
                # Weights, gradients, and this rank's share of Adam's state.
                assert len(tensors) > 2 * len(list(backend.chunks[0].parameters()))
                kept = Offloaded()
                kept.take(tensors)
                assert {t.untyped_storage().nbytes() for t in tensors} == {0}
                kept.restore()
        outcomes.append(parameters_of(backend))
    return all(map(torch.equal, *outcomes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("layout", ["tp1", "dp2", "pp2"])
def test_training_goes_on_bit_by_bit_after_memory_was_given_back(layout, dtype, folder, pool):
    assert all(pool(LAYOUTS[layout].world_size).run(offload_job, layout, folder, dtype))


def bf16_job(layout, folder, dtype):
    """Log-probs, metrics of two steps, and log-probs after them."""
    split = MicroBatching(micro_batch_size=2)
    backend = make_backend(folder, start(layout), split, temperature=1.5, dtype=dtype)
    assert {p.dtype for chunk in backend.chunks for p in chunk.parameters()} == {dtype}
    batch = make_batch()
    before = backend.logprobs(batch)
    batch = batch.with_fields(old_logprobs=before)
    objective = grpo_objective(max_response_tokens=8)
    metrics = [backend.train_step(batch, objective, lr=1e-3) for _ in range(2)]
    return before, metrics, backend.logprobs(batch)


@pytest.fixture(scope="module")
def bf16_folder(tmp_path_factory):
    """Weights that bf16 holds exactly: what is left are roundings of activations."""
    return make_tiny_hf(tmp_path_factory.mktemp("bf16"), "qwen3", dtype=torch.bfloat16, width=0.15)


@pytest.mark.parametrize("layout", ["tp1", *TWO_RANKS])
def test_bf16_is_near_fp32_and_near_itself_on_other_layouts(layout, bf16_folder, pool):
    full, full_metrics, _ = pool(1).run(bf16_job, "tp1", bf16_folder, torch.float32)[0]
    alone, alone_metrics, alone_after = pool(1).run(bf16_job, "tp1", bf16_folder, torch.bfloat16)[0]
    world_size = LAYOUTS[layout].world_size
    half, metrics, after = pool(world_size).run(bf16_job, layout, bf16_folder, torch.bfloat16)[0]
    assert (half - full).abs().max() <= 5e-2
    assert metrics[0]["policy/ratio_max"] == pytest.approx(1.0, abs=1e-6)
    assert metrics[0]["optimizer/grad_norm"] == pytest.approx(
        full_metrics[0]["optimizer/grad_norm"], rel=2e-2
    )
    # Pipelining and data parallelism round nowhere else; tensor parallelism adds rounded halves,
    # and Adam makes whole steps of what is left.
    if layout == "tp2-sp":
        assert (half - alone).abs().max() <= 5e-2
    else:
        assert torch.equal(half, alone)
        assert (after - alone_after).abs().max() <= 1e-2
    assert metrics[0]["loss/total"] == pytest.approx(alone_metrics[0]["loss/total"], abs=1e-6)
    assert not torch.equal(after, half)


def recompute_job(layout, folder):
    """Metrics and gradients of one step, with activations kept and recomputed."""
    found = []
    for recompute in ("none", "full"):
        backend = make_backend(
            folder,
            start(layout),
            MicroBatching(micro_batch_size=2),
            OPTIMIZER.model_copy(update={"clip_grad": 0.0}),
            recompute=recompute,
            distributed_optimizer=False,
        )
        assert backend.chunks[0].config.recompute_granularity == (
            "full" if recompute == "full" else None
        )
        metrics = backend.train_step(make_batch(), sft_objective(), lr=1e-3)
        found.append((metrics, gradients_of(backend)))
    return found


@pytest.mark.parametrize("layout", ["tp1", "tp2-sp", "pp2"])
def test_recomputed_activations_give_the_same_gradients(layout, folder, pool):
    for (metrics, kept), (metrics_again, recomputed) in pool(LAYOUTS[layout].world_size).run(
        recompute_job, layout, folder
    ):
        assert metrics == metrics_again
        assert [name for name in kept if not torch.equal(kept[name], recomputed[name])] == []
