"""ZeRO changes no number: reward models, bf16, recomputation, one pass and offload are those of the
torch backend, or of the same stage without."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from rl_megatron.backends.deepspeed.package import load_disk_reader
from rl_megatron.backends.torch import TorchBackend
from rl_megatron.data.packing import MicroBatching
from rl_megatron.errors import ConfigError
from rl_megatron.losses import grpo_objective, reward_model_objective, sft_objective
from rl_megatron.models.families import read_shape
from rl_megatron.models.fresh_head import fresh_head
from rl_megatron.parallel.process import start_data_parallel
from tests.helpers.backend_contract import (
    OPTIMIZER,
    TEMPERATURE,
    assert_close_weights,
    assert_same_weights,
    lopsided_batch,
    make_batch,
    weights_of,
)
from tests.helpers.recomputed import count_recomputed
from tests.helpers.tiny_model import make_tiny_hf

# Then Adam's first moment is the gradient, see tools/parity_backends.py.
BARE = OPTIMIZER.model_copy(update={"clip_grad": 0.0, "adam_beta1": 0.0})
# As the torch backend has them.
PADDED = MicroBatching(micro_batch_size=2, packed=False)
GRPO = grpo_objective(max_response_tokens=8, use_kl_loss=True, kl_loss_coef=0.1)
REWARD = reward_model_objective(center_rewards_coefficient=0.05)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_hf(tmp_path_factory.mktemp("qwen3"), "qwen3", width=0.15, tie=True)


def step_job(stage, folder, batch, variants):
    """By variant of settings: metrics and gradient of a step, and the weights after another one."""
    from tests.helpers.deepspeed_job import make_deepspeed
    from tools.parity_backends import deepspeed_gradients

    process = start_data_parallel()
    found = []
    for settings in variants:
        backend = make_deepspeed(folder, process, stage, PADDED, BARE, **settings)
        metrics = backend.train_step(batch, GRPO, lr=1e-3)
        gradients = deepspeed_gradients(backend)
        backend.train_step(batch, GRPO, lr=1e-3)
        found.append((metrics, gradients, weights_of(backend)))
        backend.close()
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_gradient_of_one_rank_is_that_of_the_torch_backend_to_the_bit(stage, folder, pool):
    from tools.parity_backends import torch_gradients

    batch = lopsided_batch(folder, paired=False)
    alone = TorchBackend(folder, start_data_parallel(), PADDED, TEMPERATURE, optimizer=BARE)
    expected = alone.train_step(batch, GRPO, lr=1e-3)
    expected_gradients = torch_gradients(alone)
    alone.train_step(batch, GRPO, lr=1e-3)
    ((metrics, gradients, weights),) = pool(1).run(step_job, stage, folder, batch, [{}])[0]
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        difference = float((gradients[name] - gradient).norm() / gradient.norm())
        # Weights of stage 3 lie elsewhere in memory, where some sums are made in another order.
        assert difference <= (1e-6 if stage == 3 else 0), name
    assert metrics == pytest.approx(expected, rel=1e-6)
    assert_close_weights(weights, weights_of(alone))


SAME_BITS = {
    "recompute, stage 2": (2, {"recompute": "full"}),
    "recompute, stage 3": (3, {"recompute": "full"}),
    "optimizer on the host, stage 1": (1, {"config": {"offload_optimizer": "cpu"}}),
    "optimizer on the host, stage 2": (2, {"config": {"offload_optimizer": "cpu"}}),
    "optimizer on the host, stage 3": (3, {"config": {"offload_optimizer": "cpu"}}),
    "weights on the host": (3, {"config": {"offload_param": "cpu"}}),
    "all on the host": (3, {"config": {"offload_optimizer": "cpu", "offload_param": "cpu"}}),
}


@pytest.mark.parametrize("name", SAME_BITS)
def test_where_things_wait_and_what_is_recomputed_changes_no_bit(name, folder, pool):
    stage, settings = SAME_BITS[name]
    same_bits(stage, settings, folder, pool)


def same_bits(stage, settings, folder, pool):
    batch = lopsided_batch(folder, paired=False)
    for plain, other in pool(2).run(step_job, stage, folder, batch, [{}, settings]):
        # On the host the squares of the gradient are added up in another order.
        norm = "optimizer/grad_norm"
        assert other[0].pop(norm) == pytest.approx(plain[0].pop(norm), rel=1e-6)
        assert other[0] == plain[0]
        assert_same_weights(other[1], plain[1])
        assert_same_weights(other[2], plain[2])


@pytest.fixture(scope="module")
def disk_reader():
    """What DeepSpeed reads and writes disks with; it is compiled once, which takes minutes."""
    start_data_parallel()
    try:
        load_disk_reader()
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def wide_folder(tmp_path_factory):
    """DeepSpeed keeps less than a MiB of a weight in memory: here a rank's embedding has more."""
    return make_tiny_hf(tmp_path_factory.mktemp("wide"), "qwen3", width=0.15, vocab_size=17000)


def on_disk(folder):
    return {"nvme_path": str(folder), "offload_optimizer": "nvme", "offload_param": "nvme"}


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("place", ["offload_optimizer", "offload_param"])
def test_what_waits_on_a_disk_is_the_same_to_the_bit(
    place, disk_reader, wide_folder, pool, tmp_path
):
    config = on_disk(tmp_path) | {place: "none"}
    same_bits(3, {"config": config}, wide_folder, pool)


def disk_job(folder, scratch, saved):
    """Bytes on the disk between two steps, the second one, and that of a backend that has read what
    was saved between them; and what is on the disk at last. Another model is there all the time."""
    from tests.helpers.deepspeed_job import make_deepspeed

    process = start_data_parallel()

    def make(**settings):
        return make_deepspeed(folder, process, 3, config=on_disk(scratch), **settings)

    def go_on(backend):
        metrics = backend.train_step(make_batch(), sft_objective(), lr=1e-2)
        return metrics, weights_of(backend)

    def size():
        process.barrier()
        return sum(path.stat().st_size for path in scratch.rglob("*") if path.is_file())

    first, frozen = make(), make(optimizer=None)
    before = weights_of(frozen)
    first.train_step(make_batch(), sft_objective(), lr=1e-2)
    first.save(saved).finish()
    written, unbroken = size(), go_on(first)
    first.close()
    second = make()
    second.load(saved)
    resumed = go_on(second)
    assert_same_weights(weights_of(frozen), before)
    second.close()
    frozen.close()
    process.barrier()
    return written, unbroken, resumed, list(scratch.iterdir())


@pytest.mark.timeout(1500)
def test_what_waits_on_a_disk_is_saved_and_read(disk_reader, wide_folder, pool, tmp_path):
    saved, scratch = tmp_path / "saved", tmp_path / "scratch"
    saved.mkdir()
    weights = load_file(wide_folder / "model.safetensors").values()
    elements = sum(weight.numel() for weight in weights)
    for written, unbroken, resumed, left in pool(2).run(disk_job, wide_folder, scratch, saved):
        # Main weights and two moments, the policy's large weights and the frozen model's.
        assert written > 4 * 4 * elements
        assert resumed[0] == unbroken[0]
        assert_same_weights(resumed[1], unbroken[1])
        assert left == []


def one_pass_job(folder, batch):
    """With the head's gradient taken in the backward pass and in the forward pass: metrics and
    gradient of a step, and rows whose logits were computed twice."""
    from tests.helpers.deepspeed_job import make_deepspeed
    from tools.parity_backends import deepspeed_gradients

    found = []
    for one_pass in (False, True):
        backend = make_deepspeed(folder, start_data_parallel(), 3, PADDED, BARE, one_pass=one_pass)
        with pytest.MonkeyPatch.context() as patch:
            recomputed = count_recomputed(patch)
            metrics = backend.train_step(batch, GRPO, lr=0.0)
        found.append((metrics, deepspeed_gradients(backend), sum(recomputed)))
        backend.close()
    return found


def test_one_pass_under_stage_3_gives_the_numbers_of_two(folder, pool):
    batch = lopsided_batch(folder, paired=False)
    ranks = pool(2).run(one_pass_job, folder, batch)
    for (metrics, gradients, _), (hot_metrics, hot_gradients, hot_rows) in ranks:
        assert hot_metrics == pytest.approx(metrics, rel=1e-6)
        for name, gradient in gradients.items():
            assert float((hot_gradients[name] - gradient).norm() / gradient.norm()) < 2e-6, name
        assert hot_rows == 0
    assert sum(two[2] for two, _ in ranks) == int(batch.response_mask.sum())


def reward_job(stage, folder, batch, head):
    """Scores before and after two steps, trained and frozen, the steps' metrics, and weights."""
    from tests.helpers.deepspeed_job import make_deepspeed

    process = start_data_parallel()
    frozen = make_deepspeed(folder, process, stage, PADDED, None, head=head)
    backend = make_deepspeed(folder, process, stage, PADDED, head=head)
    return frozen.scores(batch), *reward_steps(backend, batch)


def reward_steps(backend, batch):
    before = backend.scores(batch)
    metrics = [backend.train_step(batch, REWARD, lr=1e-2) for _ in range(2)]
    return before, metrics, backend.scores(batch), weights_of(backend)


@pytest.mark.parametrize("fresh", [False, True], ids=["its own head", "a fresh head"])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_reward_model_is_that_of_the_torch_backend(stage, fresh, folder, pool, tmp_path):
    head = None
    if fresh:
        head = fresh_head(replace(read_shape(folder), initializer_range=0.5), seed=3)
    else:
        folder = make_tiny_hf(tmp_path, "qwen2", width=0.15, scalar_head=True)
    batch = make_batch(num_sequences=10, paired=True)
    alone = TorchBackend(folder, start_data_parallel(), PADDED, optimizer=OPTIMIZER, head=head)
    before, metrics, after, weights = reward_steps(alone, batch)
    assert "score.weight" in weights and "lm_head.weight" not in weights
    assert float((after - before).abs().min()) > 1e-3
    for frozen, *found in pool(2).run(reward_job, stage, folder, batch, head):
        torch.testing.assert_close(frozen, before, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(found[0], before, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(found[2], after, atol=1e-4, rtol=1e-4)
        for step, want in zip(found[1], metrics, strict=True):
            assert step == pytest.approx(want, rel=1e-4, abs=1e-6)
        assert_close_weights(found[3], weights)


def bf16_job(stage, folder):
    """Log-probs, metrics of two steps, and log-probs after them."""
    from tests.helpers.deepspeed_job import make_deepspeed

    backend = make_deepspeed(
        folder, start_data_parallel(), stage, PADDED, temperature=1.5, dtype=torch.bfloat16
    )
    assert {value.dtype for value in weights_of(backend).values()} == {torch.bfloat16}
    return two_steps(backend)


def two_steps(backend):
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


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bf16_is_that_of_one_process(stage, ranks, bf16_folder, pool):
    def alone(dtype):
        return two_steps(
            TorchBackend(bf16_folder, start_data_parallel(), PADDED, 1.5, dtype, OPTIMIZER)
        )

    full, full_metrics, _ = alone(torch.float32)
    one, one_metrics, one_after = alone(torch.bfloat16)
    for half, metrics, after in pool(ranks).run(bf16_job, stage, bf16_folder):
        assert torch.equal(half, one)
        assert not torch.equal(half, full)
        assert metrics[0]["policy/ratio_max"] == pytest.approx(1.0, abs=1e-6)
        assert metrics[0]["loss/total"] == pytest.approx(one_metrics[0]["loss/total"], abs=1e-6)
        norm = "optimizer/grad_norm"
        assert metrics[0][norm] == pytest.approx(full_metrics[0][norm], rel=2e-2)
        assert metrics[0][norm] == pytest.approx(one_metrics[0][norm], rel=1e-5)
        assert (after - one_after).abs().max() <= 1e-2
        assert not torch.equal(after, half)


def recomputed_layers_job(folder):
    """How often a layer runs in a step, with activations kept and recomputed."""
    from tests.helpers.deepspeed_job import make_deepspeed

    counts = []
    for recompute in ("none", "full"):
        backend = make_deepspeed(folder, start_data_parallel(), 3, recompute=recompute)
        calls = []
        first = backend.module.model.model.layers[0].mlp
        first.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        backend.train_step(make_batch(), sft_objective(), lr=0.0)
        counts.append(len(calls))
        backend.close()
    return counts


def test_layers_are_computed_again_under_stage_3(folder, pool):
    assert pool(2).run(recomputed_layers_job, folder) == [[1, 2]] * 2
