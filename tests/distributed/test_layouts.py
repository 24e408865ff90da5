"""One optimiser step is the same step under every layout and every split into micro-batches.

The oracle of the numbers is the torch backend, that of the gradient autograd on the float64 model.
"""

import math

import pytest
import torch

from rl_megatron.data.packing import MicroBatching
from rl_megatron.interfaces.objective import ModelOutput
from rl_megatron.losses import dpo_objective, grpo_objective, sft_objective, totals
from tests.helpers.backend_contract import (
    OPTIMIZER,
    TEMPERATURE,
    assert_close_weights,
    lopsided_batch,
    weights_of,
)
from tests.helpers.megatron_job import (
    LAYOUTS,
    gradients_of,
    make_backend,
    start,
)
from tests.helpers.oracle import batch_logprobs, oracle_model
from tests.helpers.tiny_model import make_tiny_hf

# Tied embeddings live on two stages; norms of heads and biases are where sequence parallelism
# needs sums of its own.
MODELS = {"qwen3-tied": {"family": "qwen3", "tie": True}, "qwen2": {"family": "qwen2"}}
OBJECTIVES = {
    "grpo-sequences": grpo_objective(
        max_response_tokens=8,
        loss_agg_mode="seq-mean-token-mean",
        use_kl_loss=True,
        kl_loss_coef=0.1,
        kl_loss_type="k3",
    ),
    "grpo-tokens": grpo_objective(
        max_response_tokens=8,
        loss_agg_mode="token-mean",
        use_kl_loss=True,
        kl_loss_coef=0.1,
        kl_loss_type="k2",
    ),
    "dpo": dpo_objective(beta=0.1, rpo_alpha=0.2),
    "sft": sft_objective(),
}
SPLITS = {
    "2": MicroBatching(micro_batch_size=2),
    "1": MicroBatching(micro_batch_size=1),
    "all": MicroBatching(micro_batch_size=1000),
    "budget": MicroBatching(max_tokens_per_micro_batch=40),
    "padded": MicroBatching(micro_batch_size=3, packed=False),
}
EVERY_STEP = [(objective, "2") for objective in OBJECTIVES] + [
    ("grpo-sequences", "1"),
    ("grpo-sequences", "all"),
    ("dpo", "budget"),
]
STEPS = {"qwen3-tied": EVERY_STEP, "qwen2": [("grpo-sequences", "2"), ("dpo", "1")]}
NO_CLIPPING = OPTIMIZER.model_copy(update={"clip_grad": 0.0})


def two_steps(backend, batch, objective):
    return [backend.train_step(batch, OBJECTIVES[objective], lr) for lr in (3e-4, 3e-4)]


def steps_job(layout, folder, batches, steps):
    """Metrics of two steps and the weights after them, by (objective, split)."""
    process = start(layout)
    found = {}
    for objective, split in steps:
        backend = make_backend(folder, process, SPLITS[split])
        metrics = two_steps(backend, batches[objective], objective)
        found[objective, split] = metrics, weights_of(backend)
        backend.close()
    return found


def gradients_job(layout, folder, batches):
    """The gradient of one step by objective, under Hugging Face names."""
    process = start(layout)
    found = {}
    for objective in OBJECTIVES:
        backend = make_backend(
            folder, process, SPLITS["2"], NO_CLIPPING, distributed_optimizer=False
        )
        backend.train_step(batches[objective], OBJECTIVES[objective], lr=1e-2)
        found[objective] = gradients_of(backend)
        backend.close()
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {
        name: make_tiny_hf(tmp_path_factory.mktemp(name), layers=4, width=0.15, **settings)
        for name, settings in MODELS.items()
    }


@pytest.fixture(scope="module")
def problem(folders):
    """(folder, batch by objective) of a model."""
    batches = {
        name: {
            objective: lopsided_batch(folder, paired=objective == "dpo") for objective in OBJECTIVES
        }
        for name, folder in folders.items()
    }
    return lambda name: (folders[name], batches[name])


@pytest.fixture(scope="module")
def expected(problem):
    """What the torch backend makes of every step."""
    from rl_megatron.backends.torch import TorchBackend
    from rl_megatron.parallel.process import start_data_parallel

    def run(name, objective):
        folder, batches = problem(name)
        backend = TorchBackend(
            folder, start_data_parallel(), SPLITS["all"], TEMPERATURE, optimizer=OPTIMIZER
        )
        metrics = two_steps(backend, batches[objective], objective)
        return metrics, weights_of(backend)

    return {(name, objective): run(name, objective) for name in MODELS for objective in OBJECTIVES}


@pytest.fixture(scope="module")
def at_one_rank(problem, pool):
    """What Megatron makes of every step on one rank."""
    return {name: pool(1).run(steps_job, "tp1", *problem(name), STEPS[name])[0] for name in MODELS}


def differences(found, expected, bound):
    """The metrics that are further apart than `bound`, relatively."""
    assert [list(metrics) for metrics in found] == [list(metrics) for metrics in expected]
    return [
        (step, name, now[name], before[name])
        for step, (now, before) in enumerate(zip(found, expected, strict=True))
        for name in now
        if not math.isclose(now[name], before[name], rel_tol=bound, abs_tol=1e-8)
    ]


@pytest.mark.parametrize("model", MODELS)
def test_one_rank_agrees_with_the_torch_backend(model, expected, at_one_rank):
    for (objective, split), (metrics, weights) in at_one_rank[model].items():
        want, want_weights = expected[model, objective]
        assert differences(metrics, want, 1e-5) == [], (objective, split)
        assert_close_weights(weights, {name: want_weights[name] for name in weights})
    clipped = at_one_rank[model]["grpo-sequences", "2"][0][0]
    assert clipped["policy/clip_fraction_low"] > 0
    assert clipped["policy/clip_fraction_high"] > 0


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "layout", ["tp2", "tp2-sp", "pp2", "dp2", "cp2", "pp2-vpp2", "tp2-pp2-sp", "cp2-tp2-sp"]
)
def test_a_step_is_the_same_on_every_layout(layout, model, problem, at_one_rank, pool):
    ranks = pool(LAYOUTS[layout].world_size).run(steps_job, layout, *problem(model), STEPS[model])
    for key, (want, want_weights) in at_one_rank[model].items():
        for found in ranks:
            assert found[key][0] == ranks[0][key][0]
        metrics, weights = ranks[0][key]
        assert differences(metrics, want, 1e-5) == [], key
        assert_close_weights(weights, want_weights)


def oracle_gradients(folder, batch, objective):
    """Autograd through transformers in float64, one sequence at a time."""
    model = oracle_model(folder)
    model.zero_grad()
    batch = objective.weigh(batch)
    logprobs = batch_logprobs(model, batch, TEMPERATURE)
    output = ModelOutput(logprobs, torch.zeros_like(logprobs))
    objective.loss(output, batch, totals(batch)).loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return found


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", ["tp1", "tp2", "tp2-sp", "pp2", "dp2", "pp2-vpp2", "tp2-pp2-sp"])
def test_every_gradient_is_that_of_the_oracle(layout, model, problem, pool):
    folder, batches = problem(model)
    ranks = pool(LAYOUTS[layout].world_size).run(gradients_job, layout, folder, batches)
    for objective, batch in batches.items():
        want = oracle_gradients(folder, batch, OBJECTIVES[objective])
        for found in ranks:
            assert sorted(found[objective]) == sorted(want)
            off = {
                name: float((value.double() - want[name]).norm() / want[name].norm())
                for name, value in found[objective].items()
            }
            assert {name: error for name, error in off.items() if not error <= 2e-5} == {}
