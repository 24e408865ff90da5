"""What ZeRO holds and leaves behind is what others hold: files, digests, caches, checkpoints."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rl_megatron.checkpoint.digest import folder_digest
from rl_megatron.checkpoint.pieces import PieceFiles
from rl_megatron.losses import sft_objective
from rl_megatron.parallel.process import start_data_parallel
from tests.helpers.backend_contract import WHOLE, make_batch, weights_of
from tests.helpers.minimal_runs import DPO, with_settings
from tests.helpers.tiny_model import make_tiny_hf

MODELS = {"qwen3-tied": {"family": "qwen3", "tie": True}, "qwen3_moe": {"family": "qwen3_moe"}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {
        name: make_tiny_hf(tmp_path_factory.mktemp(name), width=0.15, **settings)
        for name, settings in MODELS.items()
    }


def digests_job(folder):
    """Of the model under stage 3, and of Megatron's."""
    from rl_megatron.runtime.reference_cache import backend_digest
    from tests.helpers.deepspeed_job import make_deepspeed
    from tests.helpers.megatron_job import make_backend, start

    process = start_data_parallel()
    shared = backend_digest(make_deepspeed(folder, process, 3), process)
    process = start("tp2-sp")
    return shared, backend_digest(make_backend(folder, process, optimizer=None), process)


@pytest.mark.parametrize("name", MODELS)
def test_a_shared_model_has_the_digest_of_its_files_and_of_megatrons(name, folders, pool):
    digest = folder_digest(folders[name])
    assert pool(2).run(digests_job, folders[name]) == [(digest, digest)] * 2


def cache_job(backend, folder, cache, batch, builds, borrowed):
    """The log-probs of a run's cache, and those of its model."""
    from rl_megatron.config import DPORun, build_run
    from rl_megatron.runtime.build import build_policy
    from rl_megatron.runtime.reference_cache import cached_reference, reference_scorer
    from tests.helpers.megatron_job import start

    process = start("tp2") if backend == "megatron" else start_data_parallel()
    settings = {
        "backend": backend,
        "model": {"path": str(folder), "dtype": "float32"},
        "reference": {"cache": str(cache), "build_cache": builds, "verify_rows": 4},
    }
    if backend == "megatron":
        settings["parallel__tensor_model_parallel_size"] = 2
    else:
        settings["deepspeed__zero_stage"] = 3
    run = build_run(DPORun, with_settings(DPO, **settings))
    # The reference is the policy before its first step, or a frozen model of its own.
    policy = build_policy(run, process, WHOLE, trained=borrowed)
    scorer = reference_scorer(run, process, WHOLE, policy if borrowed else None)
    found = cached_reference(run, process, scorer, lambda: iter([batch])).logprobs(batch)
    return found, policy.logprobs(batch)


@pytest.mark.parametrize("borrowed", [True, False], ids=["of the policy", "frozen"])
@pytest.mark.parametrize("writer", ["megatron", "deepspeed"])
def test_dpo_02_a_cache_of_one_backend_serves_the_other(writer, borrowed, folders, pool, tmp_path):
    reader = {"megatron": "deepspeed", "deepspeed": "megatron"}[writer]
    folder, batch, cache = folders["qwen3-tied"], make_batch(8, paired=True), tmp_path / "cache"
    for found, own in pool(2).run(cache_job, writer, folder, cache, batch, True, borrowed):
        torch.testing.assert_close(found, own, atol=1e-5, rtol=0)
    written = found
    for found, own in pool(2).run(cache_job, reader, folder, cache, batch, False, borrowed):
        assert torch.equal(found, written)
        torch.testing.assert_close(found, own, atol=1e-5, rtol=0)


def save_job(stage, folder, saved):
    """Save after two steps; weights then, and the loss and weights of another step."""
    from tests.helpers.deepspeed_job import make_deepspeed

    process = start_data_parallel()
    backend = make_deepspeed(folder, process, stage)
    for _ in range(2):
        backend.train_step(make_batch(), sft_objective(), lr=1e-2)
    _save(backend, process, saved)
    return _go_on(backend)


def load_job(stage, folder, saved, again):
    """Load and save at once; weights then, and the loss and weights of another step."""
    from tests.helpers.deepspeed_job import make_deepspeed

    process = start_data_parallel()
    backend = make_deepspeed(folder, process, stage)
    backend.load(saved)
    _save(backend, process, again)
    return _go_on(backend)


def _save(backend, process, folder):
    if process.is_main:
        folder.mkdir()
    process.barrier()
    backend.save(folder).finish()


def _go_on(backend):
    before = weights_of(backend)
    metrics = backend.train_step(make_batch(), sft_objective(), lr=1e-2)
    return before, metrics["loss/total"], weights_of(backend)


def whole_state(folder: Path, model_folder: Path):
    """Main weights and moments by parameter, put together from all files."""
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    with PieceFiles(folder) as files:
        return files.metadata, {
            (name, field): files.shard(f"model.{name}", field, 0)
            for name, _ in model.named_parameters()
            for field in ("main", "exp_avg", "exp_avg_sq")
        }


@pytest.fixture(scope="module")
def saved(folders, pool, tmp_path_factory):
    """By ranks and stage: the folder, and how it went on."""
    made = {}

    def save(ranks, stage):
        if (ranks, stage) not in made:
            folder = tmp_path_factory.mktemp("saved") / "state"
            went_on = pool(ranks).run(save_job, stage, folders["qwen3_moe"], folder)[0]
            made[ranks, stage] = folder, went_on
        return made[ranks, stage]

    return save


@pytest.mark.parametrize(
    ("saver", "loader"),
    [
        ((2, 3), (1, 3)),
        ((2, 3), (1, 0)),
        ((2, 3), (2, 3)),
        ((2, 3), (2, 2)),
        ((2, 3), (3, 1)),
        ((2, 2), (2, 2)),
        ((1, 2), (2, 3)),
        ((1, 0), (2, 3)),
    ],
    ids=lambda pair: f"stage {pair[1]} on {pair[0]}",
)
def test_what_one_job_saved_another_goes_on_with(saver, loader, folders, saved, pool, tmp_path):
    folder, (weights, loss, after) = saved(*saver)
    again = tmp_path / "again"
    ranks, stage = loader
    metadata, expected = whole_state(folder, folders["qwen3_moe"])
    for found in pool(ranks).run(load_job, stage, folders["qwen3_moe"], folder, again):
        assert all(torch.equal(found[0][name], value) for name, value in weights.items())
        assert found[1] == pytest.approx(loss, rel=1e-6)
        if saver == loader:
            assert found[1] == loss
            assert all(torch.equal(found[2][name], value) for name, value in after.items())
    state = whole_state(again, folders["qwen3_moe"])
    assert state[0] == metadata == {"step": "2"}
    assert state[1].keys() == expected.keys()
    assert [key for key, value in expected.items() if not torch.equal(state[1][key], value)] == []
    assert all(bool(value.any()) for value in expected.values())


def sharded_job(folder, head):
    """What `load_sharded` makes of a folder: None, or the parameters' sizes here and as a whole."""
    from rl_megatron.backends.deepspeed.weights import load_sharded
    from rl_megatron.config.deepspeed import DeepSpeedConfig, engine_settings
    from tests.helpers.deepspeed_job import make_deepspeed

    process = start_data_parallel()
    settings = engine_settings(DeepSpeedConfig(zero_stage=3), "float32", 0.0, 2)
    model = load_sharded(folder, torch.float32, process, settings, head)
    if model is None:
        return None
    sizes = [(p.numel(), p.ds_tensor.numel(), p.ds_numel) for p in model.parameters()]
    shared = make_deepspeed(folder, process, 3, optimizer=None, head=head)
    return sizes, weights_of(shared)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("fresh", [False, True], ids=["its own head", "a fresh head"])
def test_stage_3_never_holds_a_whole_model(name, fresh, folders, pool):
    head = torch.linspace(-1, 1, 32)[None] if fresh else None
    expected = load_file(folders[name] / "model.safetensors")
    if fresh:
        expected.pop("lm_head.weight", None)
        expected["score.weight"] = head
    for sizes, weights in pool(2).run(sharded_job, folders[name], head):
        assert all(here == 0 and part == -(-whole // 2) for here, part, whole in sizes)
        assert weights.keys() == expected.keys()
        assert all(weights[name].equal(value) for name, value in expected.items())


def refused_job(folder):
    """What a rank hears of a folder that is not whole, and whether it was opened in shards."""
    from rl_megatron.errors import CheckpointError
    from tests.helpers.deepspeed_job import make_deepspeed

    in_shards = sharded_job(folder, None)
    try:
        make_deepspeed(folder, start_data_parallel(), 3)
    except CheckpointError as error:
        return in_shards, str(error)
    return in_shards, None


def _drop(weights):
    del weights["model.layers.1.mlp.up_proj.weight"]


def _cut(weights):
    weights["model.norm.weight"] = weights["model.norm.weight"][:-1].clone()


def _add(weights):
    weights["model.layers.7.mlp.up_proj.weight"] = torch.zeros(2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_drop, "lacks model.layers.1.mlp.up_proj"),
        (_cut, "holds model.norm.weight of shape [31]"),
        (_add, "holds model.layers.7.mlp.up_proj"),
    ],
)
def test_files_of_another_model_are_refused_under_stage_3(change, words, folders, pool, tmp_path):
    for path in folders["qwen3-tied"].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    change(weights)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for in_shards, said in pool(2).run(refused_job, tmp_path):
        assert in_shards is None
        assert words in said and str(tmp_path) in said
