"""Weights and optimizer state saved under one layout go on under another, bit by bit.

The gradient is made from the weight itself, element by element, and Adam works element by
element: so the right answer does not depend on the layout at all.
"""

import pytest
import torch

from tests.helpers.tiny_model import make_tiny_hf

VOCAB, DIVISOR = 131, 64
LAYOUTS = {
    "tp1": {},
    "tp2": {"tensor": 2},
    "pp2": {"pipeline": 2},
    "dp2": {"data": 2},
    "pp2vpp2": {"pipeline": 2, "virtual": 2},
    "ep2": {"data": 2, "expert": 2},
    "ep2tp2": {"data": 2, "expert": 2, "tensor": 2, "sequence_parallel": True},
    "tp2sp": {"tensor": 2, "sequence_parallel": True},
}


@pytest.fixture(scope="module")
def hf_folder(tmp_path_factory):
    return make_tiny_hf(tmp_path_factory.mktemp("hf"), "qwen3", VOCAB, layers=4, tie=True)


def world_size(name):
    return {"tp1": 1, "ep2tp2": 4}.get(name, 2)


class Trainer:
    """A model under Megatron's data parallelism and optimizer, without losses or data."""

    def __init__(self, layout, hf, distributed_optimizer, dtype):
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        from rl_megatron.checkpoint.hf_load import load_hf_weights
        from rl_megatron.models.families import read_shape, weight_rules
        from rl_megatron.models.gpt import build_model
        from rl_megatron.parallel.layout import Layout
        from rl_megatron.parallel.process import start_megatron

        self.process = start_megatron(Layout(**layout), seed=0)
        shape = read_shape(hf)
        self.rules = weight_rules(shape, DIVISOR)
        chunks = build_model(shape, self.process, dtype, DIVISOR)
        load_hf_weights(chunks, self.rules, hf, self.process)
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=distributed_optimizer
        )
        self.chunks = [DistributedDataParallel(c.config, settings, c) for c in chunks]
        config = OptimizerConfig(
            optimizer="adam",
            lr=0.01,
            weight_decay=0.1,
            clip_grad=0.0,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=distributed_optimizer,
        )
        self.optimizer = get_megatron_optimizer(config, self.chunks)

    @property
    def state(self):
        return self.chunks, self.rules, self.optimizer, self.process

    def step(self):
        for chunk in self.chunks:
            for parameter in chunk.parameters():
                parameter.main_grad.copy_(torch.sin(7 * parameter.detach().float()))
        self.optimizer.step()

    def weights(self):
        from rl_megatron.checkpoint.hf_save import iter_hf_weights

        named = iter_hf_weights(self.chunks, self.rules, self.process)
        return {name: tensor.clone() for name, tensor in named}


def uninterrupted_job(layout, hf, distributed_optimizer, dtype):
    trainer = Trainer(layout, hf, distributed_optimizer, dtype)
    for _ in range(3):
        trainer.step()
    return trainer.weights()


def save_job(layout, hf, distributed_optimizer, dtype, root):
    from rl_megatron.checkpoint.megatron import MegatronWeights
    from rl_megatron.checkpoint.megatron_optimizer import optimizer_pieces
    from rl_megatron.checkpoint.publish import new_checkpoint
    from rl_megatron.checkpoint.saving import save_parts

    trainer = Trainer(layout, hf, distributed_optimizer, dtype)
    for _ in range(2):
        trainer.step()
    with new_checkpoint(root, 2, trainer.process) as folder:
        weights = MegatronWeights(folder, trainer.chunks)
        state = optimizer_pieces(folder, *trainer.state)
        save_parts(folder, trainer.process, [weights, state], background=False)


def resume_job(layout, hf, distributed_optimizer, dtype, root):
    from rl_megatron.checkpoint.megatron import load_megatron
    from rl_megatron.checkpoint.megatron_optimizer import load_optimizer
    from rl_megatron.checkpoint.publish import iteration_folder

    trainer = Trainer(layout, hf, distributed_optimizer, dtype)
    load_megatron(iteration_folder(root, 2), trainer.chunks)
    load_optimizer(iteration_folder(root, 2), *trainer.state)
    trainer.step()
    return trainer.weights()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("saved", "resumed", "distributed_optimizer"),
    [
        ("dp2", "dp2", True),
        ("dp2", "tp2", True),
        ("tp2", "pp2", True),
        ("pp2vpp2", "tp1", True),
        ("tp2", "tp2", False),
        ("tp2", "pp2", False),
    ],
)
def test_training_goes_on_bit_by_bit_under_another_layout(
    saved, resumed, distributed_optimizer, dtype, hf_folder, pool, tmp_path
):
    check_training_goes_on(saved, resumed, distributed_optimizer, dtype, hf_folder, pool, tmp_path)


def check_training_goes_on(saved, resumed, distributed_optimizer, dtype, hf_folder, pool, tmp_path):
    args = (hf_folder, distributed_optimizer, dtype)
    expected = pool(1).run(uninterrupted_job, {}, *args)[0]
    pool(world_size(saved)).run(save_job, LAYOUTS[saved], *args, tmp_path / "root")
    found = pool(world_size(resumed)).run(resume_job, LAYOUTS[resumed], *args, tmp_path / "root")
    for rank in found:
        assert rank.keys() == expected.keys()
        for name, tensor in expected.items():
            assert rank[name].equal(tensor), name


@pytest.fixture(scope="module")
def folder_with_experts(tmp_path_factory):
    return make_tiny_hf(tmp_path_factory.mktemp("experts"), "qwen3_moe", VOCAB)


@pytest.mark.parametrize(
    ("saved", "resumed", "distributed_optimizer"),
    [
        ("ep2", "tp1", True),
        ("tp2sp", "ep2", True),
        ("ep2", "ep2tp2", True),
        ("ep2tp2", "ep2", False),
    ],
)
def test_training_of_experts_goes_on_under_another_expert_parallel_size(
    saved, resumed, distributed_optimizer, folder_with_experts, pool, tmp_path
):
    check_training_goes_on(
        saved, resumed, distributed_optimizer, torch.float32, folder_with_experts, pool, tmp_path
    )
