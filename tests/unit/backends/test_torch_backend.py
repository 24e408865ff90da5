"""The torch backend: the contract of all backends, bf16, tied heads, files that are not whole."""

import pytest
import torch
from safetensors.torch import load_file

from rl_megatron.backends.torch import TorchBackend
from rl_megatron.config.optimizer import OptimizerConfig
from rl_megatron.data.packing import MicroBatching
from rl_megatron.errors import CheckpointError
from rl_megatron.losses import sft_objective
from rl_megatron.parallel.process import start_data_parallel
from tests.helpers.architectures import make_architecture
from tests.helpers.backend_contract import (
    BACKEND_CHECKS,
    CLOSE,
    OPTIMIZER,
    TEMPERATURE,
    WHOLE,
    BackendSetup,
    assert_same_weights,
    make_batch,
    weights_of,
)
from tests.helpers.oracle import batch_logprobs, oracle_model
from tests.helpers.tiny_model import LLAMA3_ROPE, make_tiny_hf


@pytest.fixture(scope="module")
def process():
    return start_data_parallel()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_hf(tmp_path_factory.mktemp("llama"), "llama", rope=LLAMA3_ROPE)


def make(folder, process, optimizer=OPTIMIZER, dtype=torch.float32, micro_batching=WHOLE):
    return TorchBackend(folder, process, micro_batching, TEMPERATURE, dtype, optimizer)


@pytest.mark.parametrize("check", BACKEND_CHECKS, ids=lambda check: check.__name__)
def test_contract(check, folder, process, tmp_path):
    def empty_folder(name):
        (tmp_path / name).mkdir()
        return tmp_path / name

    def make_one(micro_batching, optimizer):
        return make(folder, process, optimizer, micro_batching=micro_batching)

    check(BackendSetup(folder, make_one, empty_folder))


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_logprobs_of_every_family(family, process, tmp_path):
    folder = make_tiny_hf(tmp_path, family, tie=family == "qwen3")
    batch = make_batch()
    found = make(folder, process, None).logprobs(batch).double()
    expected = batch_logprobs(oracle_model(folder), batch, TEMPERATURE)
    torch.testing.assert_close(found, expected.detach(), **CLOSE)


def test_a_tied_head_is_one_weight_with_the_gradient_of_both(process, tmp_path):
    folder = make_tiny_hf(tmp_path, tie=True)
    backend = make(folder, process, OptimizerConfig(clip_grad=0))
    names = [name for name, _ in backend.named_weights()]
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    batch = make_batch()
    metrics = backend.train_step(batch, sft_objective(), lr=1e-2)
    model = oracle_model(folder)
    model.zero_grad()
    (-batch_logprobs(model, batch, TEMPERATURE).sum() / batch.response_mask.sum()).backward()
    norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
    model.zero_grad()
    assert metrics["optimizer/grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_bfloat16_steps_are_taken_in_float32(folder, process):
    # Each step is far below what bfloat16 can add to a weight of 0.25; all of them together not.
    batch, steps, lr = make_batch(), 40, 2e-5
    settings = OptimizerConfig(clip_grad=0, adam_beta1=0.0, adam_beta2=0.0, adam_eps=1e-12)
    backend = make(folder, process, settings, torch.bfloat16)
    before = weights_of(backend)
    assert {value.dtype for value in before.values()} == {torch.bfloat16}
    for _ in range(steps):
        backend.train_step(batch, sft_objective(), lr)
    head = "lm_head.weight"
    moved = (weights_of(backend)[head] != before[head]).float().mean().item()
    # A bfloat16 of size 0.25 to 0.5 has steps of 2e-3: about 40 x 2e-5 / 2e-3 of them move.
    assert moved > 0.2
    one_step = make(folder, process, settings, torch.bfloat16)
    one_step.train_step(batch, sft_objective(), lr)
    assert (weights_of(one_step)[head] != before[head]).float().mean().item() < moved / 4


def test_bfloat16_gradients_of_micro_batches_add_up_in_float32(folder, process):
    batch = make_batch(num_sequences=24)
    norms = [
        make(folder, process, OPTIMIZER, torch.bfloat16, split).train_step(
            batch, sft_objective(), lr=1e-3
        )["optimizer/grad_norm"]
        for split in (WHOLE, MicroBatching(micro_batch_size=1))
    ]
    assert norms[1] == pytest.approx(norms[0], rel=5e-3)


def test_a_bfloat16_model_saves_its_float32_main_weights(folder, process, tmp_path):
    batch = make_batch()
    saved = make(folder, process, dtype=torch.bfloat16)
    saved.train_step(batch, sft_objective(), lr=1e-3)
    saved.save(tmp_path)
    assert {v.dtype for v in load_file(tmp_path / "model.safetensors").values()} == {torch.float32}
    fresh = make(folder, process, dtype=torch.bfloat16)
    fresh.load(tmp_path)
    for backend in (saved, fresh):
        backend.train_step(batch, sft_objective(), lr=1e-3)
    assert_same_weights(weights_of(fresh), weights_of(saved))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_of_many_weights_are_saved_and_go_on_to_the_bit(dtype, process, tmp_path):
    # Experts are one parameter of a layer, and a buffer is a weight.
    folder = make_architecture(tmp_path / "model", "deepseek_v3")
    (tmp_path / "saved").mkdir()
    saved, fresh = (make(folder, process, dtype=dtype) for _ in range(2))
    saved.train_step(make_batch(), sft_objective(), lr=1e-2)
    saved.save(tmp_path / "saved")
    names = load_file(folder / "model.safetensors").keys()
    assert load_file(tmp_path / "saved" / "model.safetensors").keys() == names
    fresh.load(tmp_path / "saved")
    metrics = [b.train_step(make_batch(), sft_objective(), lr=1e-2) for b in (saved, fresh)]
    assert metrics[0] == metrics[1]
    assert_same_weights(weights_of(fresh), weights_of(saved))


def test_a_frozen_model_loads_the_weights_of_a_trained_one(folder, process, tmp_path):
    trained = make(folder, process)
    trained.train_step(make_batch(), sft_objective(), lr=1e-2)
    trained.save(tmp_path)
    frozen = make(folder, process, optimizer=None)
    frozen.load(tmp_path)
    assert_same_weights(weights_of(frozen), weights_of(trained))


def test_settings_of_the_run_win_over_those_of_the_checkpoint(folder, process, tmp_path):
    make(folder, process).save(tmp_path)
    batch = make_batch()
    decayed, plain = [
        make(folder, process, OPTIMIZER.model_copy(update={"weight_decay": decay}))
        for decay in (0.5, 0.0)
    ]
    for backend in (decayed, plain):
        backend.load(tmp_path)
        backend.train_step(batch, sft_objective(), lr=1e-2)
    name = "model.layers.0.mlp.up_proj.weight"
    start = load_file(tmp_path / "model.safetensors")[name]
    difference = weights_of(plain)[name] - weights_of(decayed)[name]
    torch.testing.assert_close(difference, 1e-2 * 0.5 * start, atol=1e-6, rtol=1e-3)


def test_a_checkpoint_without_its_optimizer_is_refused(folder, process, tmp_path):
    make(folder, process, optimizer=None).save(tmp_path)
    with pytest.raises(CheckpointError, match=r"optimizer\.pt cannot be read"):
        make(folder, process).load(tmp_path)
    (tmp_path / "optimizer.pt").write_bytes(b"not a checkpoint")
    with pytest.raises(CheckpointError, match=r"optimizer\.pt cannot be read"):
        make(folder, process).load(tmp_path)


def test_weights_of_another_model_are_refused(folder, process, tmp_path):
    other = make_tiny_hf(tmp_path / "other", layers=3)
    with pytest.raises(CheckpointError, match=r"model\.layers\.2.*no such weight"):
        make(folder, process, optimizer=None).load(other)
    fewer = make_tiny_hf(tmp_path / "fewer", layers=1)
    with pytest.raises(CheckpointError, match=r"missing: model\.layers\.1"):
        make(folder, process, optimizer=None).load(fewer)
    wider = make_tiny_hf(tmp_path / "wider", vocab_size=140)
    with pytest.raises(CheckpointError, match=r"has shape \[140, 32\], the model has \[131, 32\]"):
        make(folder, process, optimizer=None).load(wider)
