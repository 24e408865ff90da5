"""Models with experts on every layout: logits, steps, gradients, text and conversion."""

import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl_megatron.data.packing import MicroBatching
from rl_megatron.interfaces.records import Prompt, Sampling
from rl_megatron.losses import dpo_objective, grpo_objective, totals
from tests.helpers.backend_contract import (
    OPTIMIZER,
    TEMPERATURE,
    assert_close_weights,
    lopsided_batch,
    weights_of,
)
from tests.helpers.engine_contract import PROMPTS, STOPS, assert_same_rollouts, ids_of
from tests.helpers.megatron_job import LAYOUTS, gradients_of, make_backend, start
from tests.helpers.oracle import batch_logprobs, oracle_model
from tests.helpers.tiny_model import make_tiny_hf

VOCAB = 131
MODELS = {
    "qwen3_moe": {"family": "qwen3_moe", "norm_topk_prob": True},
    "qwen3_moe-plain": {"family": "qwen3_moe", "norm_topk_prob": False, "tie": True},
    "mixtral": {"family": "mixtral"},
}
SEQUENCES = [
    torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (1, 7, 100, 2, 70, 64, 9, 8)
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {
        name: make_tiny_hf(tmp_path_factory.mktemp(name), width=0.15, **settings)
        for name, settings in MODELS.items()
    }


@pytest.fixture(scope="module")
def reference(folders):
    """The transformers model of a folder, in float32."""
    from transformers import AutoModelForCausalLM

    return {
        name: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for name, folder in folders.items()
    }


def make_engine(layout, folder, at_once=64):
    from rl_megatron.rollout.megatron import MegatronEngine

    process = start(layout)
    backend = make_backend(folder, process, optimizer=None)
    return MegatronEngine(backend.chunks, process, str, at_once), backend


def logits_job(layout, folder):
    return make_engine(layout, folder)[0].logits(SEQUENCES)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "layout", ["tp1", "tp2", "tp2-sp", "pp2", "ep2", "ep4", "ep2-tp2-sp", "ep2-pp2"]
)
def test_logits_are_those_of_transformers(layout, model, folders, reference, pool):
    with torch.no_grad():
        expected = [reference[model](torch.tensor([ids])).logits[0] for ids in SEQUENCES]
    for found in pool(LAYOUTS[layout].world_size).run(logits_job, layout, folders[model]):
        assert (found - torch.cat(expected)).abs().max() <= 2e-5


OBJECTIVES = {
    "grpo": grpo_objective(
        max_response_tokens=8,
        loss_agg_mode="token-mean",
        use_kl_loss=True,
        kl_loss_coef=0.1,
        kl_loss_type="k3",
    ),
    "dpo": dpo_objective(beta=0.1, rpo_alpha=0.2),
}
NO_CLIPPING = OPTIMIZER.model_copy(update={"clip_grad": 0.0})


def steps_job(layout, folder, batches):
    """By objective: metrics of two steps, the weights after them, the gradient of the first."""
    process = start(layout)
    found = {}
    for objective, batch in batches.items():
        backend = make_backend(folder, process, MicroBatching(micro_batch_size=2))
        metrics = [backend.train_step(batch, OBJECTIVES[objective], lr) for lr in (1e-3, 5e-4)]
        weights = weights_of(backend)
        backend.close()
        # Gradients are whole on each rank only without the distributed optimizer.
        backend = make_backend(
            folder,
            process,
            MicroBatching(micro_batch_size=1),
            NO_CLIPPING,
            distributed_optimizer=False,
        )
        backend.train_step(batch, OBJECTIVES[objective], lr=1e-2)
        found[objective] = metrics, weights, gradients_of(backend)
        backend.close()
    return found


@pytest.fixture(scope="module")
def problem(folders):
    """(folder, batch by objective) of a model."""
    return {
        name: (
            folder,
            {
                objective: lopsided_batch(folder, paired=objective == "dpo")
                for objective in OBJECTIVES
            },
        )
        for name, folder in folders.items()
    }


@pytest.fixture(scope="module")
def at_one_rank(problem, pool):
    return {name: pool(1).run(steps_job, "tp1", *problem[name])[0] for name in MODELS}


def oracle_gradients(folder, batch, objective):
    """Autograd through transformers in float64, one sequence at a time, by names in files."""
    import copy

    from rl_megatron.interfaces.objective import ModelOutput
    from rl_megatron.models.transformers_model import named_weights

    model = copy.deepcopy(oracle_model(folder))
    batch = objective.weigh(batch)
    logprobs = batch_logprobs(model, batch, TEMPERATURE)
    output = ModelOutput(logprobs, torch.zeros_like(logprobs))
    objective.loss(output, batch, totals(batch)).loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.grad)
    return dict(named_weights(model))


def off_the_oracle(found, folder, batch, objective):
    """The gradients that are further from the oracle than float32 can be, relative to its norm."""
    want = oracle_gradients(folder, batch, objective)
    assert sorted(found) == sorted(want)
    off = {
        # An expert to which no token went has no gradient.
        name: float((value.double() - want[name]).norm() / want[name].norm().clamp(min=1e-30))
        for name, value in found.items()
    }
    return {name: error for name, error in off.items() if not error <= 2e-5}


@pytest.mark.parametrize("model", MODELS)
def test_one_rank_agrees_with_the_torch_backend(model, problem, at_one_rank):
    from rl_megatron.backends.torch import TorchBackend
    from rl_megatron.parallel.process import start_data_parallel

    folder, batches = problem[model]
    for objective, batch in batches.items():
        backend = TorchBackend(
            folder,
            start_data_parallel(),
            MicroBatching(micro_batch_size=3),
            TEMPERATURE,
            optimizer=OPTIMIZER,
        )
        metrics, weights, _ = at_one_rank[model][objective]
        for lr, expected in zip((1e-3, 5e-4), metrics, strict=True):
            found = backend.train_step(batch, OBJECTIVES[objective], lr)
            assert found == pytest.approx(expected, rel=1e-5, abs=1e-8)
        assert_close_weights(weights_of(backend), weights)


@pytest.mark.parametrize("model", MODELS)
def test_gradients_of_one_rank_are_those_of_the_oracle(model, problem, at_one_rank):
    folder, batches = problem[model]
    for objective, batch in batches.items():
        gradients = at_one_rank[model][objective][2]
        assert off_the_oracle(gradients, folder, batch, OBJECTIVES[objective]) == {}
        assert all(value.any() for name, value in gradients.items() if "experts" not in name)


EVERY_LAYOUT = ["tp2-sp", "ep2", "ep2-dp2", "ep2-tp2-sp", "ep2-pp2", "ep2-cp2"]


@pytest.mark.parametrize(
    ("layout", "model"),
    [(layout, "qwen3_moe-plain") for layout in EVERY_LAYOUT]
    + [("ep2", "qwen3_moe"), ("ep2-tp2-sp", "mixtral")],
)
def test_a_step_is_the_same_on_every_layout(layout, model, problem, at_one_rank, pool):
    folder, batches = problem[model]
    ranks = pool(LAYOUTS[layout].world_size).run(steps_job, layout, folder, batches)
    for objective, batch in batches.items():
        want_metrics, want_weights, _ = at_one_rank[model][objective]
        for found in ranks:
            metrics, weights, gradients = found[objective]
            assert metrics == ranks[0][objective][0]
            for now, before in zip(metrics, want_metrics, strict=True):
                assert now == pytest.approx(before, rel=1e-5, abs=1e-8)
            assert_close_weights(weights, want_weights)
        assert off_the_oracle(gradients, folder, batch, OBJECTIVES[objective]) == {}


LONG = Prompt(row_id=1, token_ids=tuple(range(2, 90)), text="long", answer="")
SAMPLED = Sampling(temperature=TEMPERATURE, max_response_tokens=8, stop_token_ids=STOPS)
GREEDY = Sampling(temperature=0.0, max_response_tokens=8, stop_token_ids=STOPS)


def generate_job(layout, folder, at_once):
    """Greedy text of each prompt alone, samples of groups, one request for all, and none."""
    engine, backend = make_engine(layout, folder, at_once)
    prompts = [*PROMPTS, LONG]
    greedy = engine.generate(prompts, GREEDY, 1, seed=0)
    sampled = engine.generate(prompts, SAMPLED, 3, seed=5)
    single = engine.generate(prompts[2:3], SAMPLED, 1, seed=5)
    assert engine.generate([], SAMPLED, 4, seed=0) == []
    del backend
    return greedy, sampled, single


@pytest.fixture(scope="module")
def sampled_on_one_rank(folders, pool):
    return {
        name: pool(1).run(generate_job, "tp1", folder, 64)[0] for name, folder in folders.items()
    }


@pytest.mark.parametrize("model", MODELS)
def test_greedy_text_is_that_of_transformers(model, reference, sampled_on_one_rank):
    for rollout in sampled_on_one_rank[model][0]:
        ids = list(rollout.prompt.token_ids)
        while len(ids) < len(rollout.prompt.token_ids) + 8 and ids[-1] not in STOPS:
            with torch.no_grad():
                ids.append(int(reference[model](torch.tensor([ids])).logits[0, -1].argmax()))
        assert rollout.response_ids == tuple(ids[len(rollout.prompt.token_ids) :])


# Replicas have unequal work, or none at all, and still make forward passes together; with 2 at once
# they have unequal numbers of waves, too.
@pytest.mark.parametrize(
    ("layout", "at_once"),
    [("ep2", 64), ("ep4", 64), *((layout, 2) for layout in ("ep4", *EVERY_LAYOUT))],
)
def test_text_is_the_same_on_every_layout(layout, at_once, folders, sampled_on_one_rank, pool):
    model = "qwen3_moe"
    ranks = pool(LAYOUTS[layout].world_size).run(generate_job, layout, folders[model], at_once)
    for found in ranks:
        for rollouts, expected in zip(found, sampled_on_one_rank[model], strict=True):
            assert_same_rollouts(rollouts, expected)
    assert len(set(map(len, ids_of(ranks[0][1])))) > 2


def unequal_prefill_job(layout, folder):
    """One replica reads its prompts in more passes than the other."""
    from rl_megatron.rollout import megatron

    engine, _ = make_engine(layout, folder)
    budget, megatron._PREFILL_TOKENS = megatron._PREFILL_TOKENS, 9
    try:
        return engine.generate([*PROMPTS, LONG], SAMPLED, 1, seed=5)
    finally:
        megatron._PREFILL_TOKENS = budget


@pytest.mark.parametrize("layout", ["ep2", "ep2-tp2-sp"])
def test_replicas_may_read_their_prompts_in_unequal_passes(
    layout, folders, sampled_on_one_rank, pool
):
    ranks = pool(LAYOUTS[layout].world_size).run(unequal_prefill_job, layout, folders["qwen3_moe"])
    expected = [r for r in sampled_on_one_rank["qwen3_moe"][1] if r.sample_index == 0]
    for found in ranks:
        assert_same_rollouts(found, expected)


def import_job(layout, hf, root):
    from rl_megatron.checkpoint.folders import HF_SUBFOLDER
    from rl_megatron.checkpoint.hf_files import carry_hf_files
    from rl_megatron.checkpoint.publish import new_checkpoint

    process = start(layout)
    backend = make_backend(hf, process, optimizer=None)
    with new_checkpoint(root, 0, process) as folder:
        backend.save(folder)
        if process.is_main:
            carry_hf_files(hf, folder / HF_SUBFOLDER)


def export_job(layout, root, output):
    """Writes a HF folder of a checkpoint; what this rank held, by name in the whole model."""
    from rl_megatron.checkpoint.folders import resolve_model_folder
    from rl_megatron.checkpoint.hf_save import iter_hf_weights, save_hf
    from rl_megatron.checkpoint.megatron import load_megatron
    from rl_megatron.checkpoint.naming import global_parameters
    from rl_megatron.models.families import read_shape, weight_rules
    from rl_megatron.models.gpt import build_model

    found = resolve_model_folder(root)
    process = start(layout)
    shape = read_shape(found.hf)
    chunks = build_model(shape, process, torch.float32, 8)
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data.fill_(math.nan)
    load_megatron(found.megatron, chunks)
    save_hf(output, iter_hf_weights(chunks, weight_rules(shape, 8), process), found.hf, process)
    return {name: p.detach().clone() for name, p in global_parameters(chunks).items()}


def number_experts(folder):
    """Every weight of expert e becomes e, and row r of a router r."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if ".experts." in name:
            tensor.fill_(int(name.split(".experts.")[1].split(".")[0]))
        elif name.endswith("gate.weight"):
            tensor.copy_(torch.arange(len(tensor))[:, None].expand_as(tensor))
    save_file(tensors, file, metadata={"format": "pt"})
    return tensors


def assert_same_files(output, expected):
    found = load_file(output / "model.safetensors")
    assert found.keys() == expected.keys()
    assert [n for n in found if found[n].dtype != expected[n].dtype] == []
    assert [n for n in found if not torch.equal(found[n], expected[n])] == []


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_ck_05_experts_keep_their_numbers_over_expert_parallel_sizes(family, pool, tmp_path):
    hf = make_tiny_hf(tmp_path / "hf", family)
    expected = number_experts(hf)
    pool(4).run(import_job, "ep4", hf, tmp_path / "ep4")
    pool(1).run(export_job, "tp1", tmp_path / "ep4", tmp_path / "out")
    assert_same_files(tmp_path / "out", expected)

    pool(1).run(import_job, "tp1", tmp_path / "out", tmp_path / "ep1")
    ranks = pool(2).run(export_job, "ep2", tmp_path / "ep1", tmp_path / "again")
    assert_same_files(tmp_path / "again", expected)
    for rank, held in enumerate(ranks):
        experts = {name: value for name, value in held.items() if ".experts." in name}
        numbers = {int(name.split(".")[6]) for name in experts}
        assert numbers == set(range(4 * rank, 4 * rank + 4))
        for name, value in experts.items():
            assert (value == int(name.split(".")[6])).all()


@pytest.mark.parametrize(
    ("model", "saved", "loaded"),
    [
        ("qwen3_moe", "ep2-tp2-sp", "ep4"),
        ("qwen3_moe-plain", "ep2-pp2", "tp2-sp"),
        ("mixtral", "ep2", "ep2-tp2-sp"),
    ],
)
def test_import_and_export_are_bit_equal(saved, loaded, model, folders, pool, tmp_path):
    args = (folders[model], tmp_path / "megatron")
    pool(LAYOUTS[saved].world_size).run(import_job, saved, *args)
    args = (tmp_path / "megatron", tmp_path / "out")
    pool(LAYOUTS[loaded].world_size).run(export_job, loaded, *args)
    assert_same_files(tmp_path / "out", load_file(folders[model] / "model.safetensors"))


def test_ck_05_gate_and_up_halves_are_cut_one_by_one_under_expert_tensor_parallel(pool, tmp_path):
    """Gate rows g0..g3 are 0..3 and up rows u0..u3 are 10..13, in every expert."""
    hf = make_tiny_hf(tmp_path / "hf", "qwen3_moe", moe_intermediate_size=4)
    tensors = load_file(hf / "model.safetensors")
    for name, tensor in tensors.items():
        if "gate_proj" in name or "up_proj" in name:
            rows = torch.arange(4.0) + (10 if "up_proj" in name else 0)
            tensor.copy_(rows[:, None].expand_as(tensor))
    save_file(tensors, hf / "model.safetensors", metadata={"format": "pt"})
    pool(2).run(import_job, "tp2-sp", hf, tmp_path / "megatron")
    ranks = pool(4).run(export_job, "ep2-tp2-sp", tmp_path / "megatron", tmp_path / "out")
    assert_same_files(tmp_path / "out", tensors)
    rows = {0: [0, 1, 10, 11], 1: [2, 3, 12, 13]}
    for rank, held in enumerate(ranks):
        shards = [v for n, v in held.items() if ".experts." in n and "linear_fc1" in n]
        assert len(shards) == 2 * 4
        for shard in shards:
            assert shard[:, 0].tolist() == rows[rank % 2]


def test_ck_07_a_router_in_float32_stays_so_beside_bfloat16(pool, tmp_path):
    hf = make_tiny_hf(tmp_path / "hf", "mixtral", dtype=torch.bfloat16)
    tensors = load_file(hf / "model.safetensors")
    for name in [name for name in tensors if name.endswith("gate.weight")]:
        tensors[name] = tensors[name].float() + 0.1234567
    save_file(tensors, hf / "model.safetensors", metadata={"format": "pt"})
    for source, step in ((hf, "first"), (tmp_path / "first", "second")):
        pool(2).run(import_job, "ep2", source, tmp_path / f"{step}-megatron")
        pool(1).run(export_job, "tp1", tmp_path / f"{step}-megatron", tmp_path / step)
    assert_same_files(tmp_path / "first", tensors)
    first, second = (tmp_path / name / "model.safetensors" for name in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()
    assert {str(t.dtype) for t in load_file(first).values()} == {"torch.float32", "torch.bfloat16"}
