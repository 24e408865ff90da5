"""Our attention in the place of Megatron's own: the same steps on one stage and on several."""

import pytest
import torch

from rl_megatron.data.packing import MicroBatching
from rl_megatron.losses import grpo_objective
from tests.helpers.backend_contract import OPTIMIZER, lopsided_batch
from tests.helpers.megatron_job import LAYOUTS, gradients_of, make_backend, start
from tests.helpers.tiny_model import make_tiny_hf

NO_CLIPPING = OPTIMIZER.model_copy(update={"clip_grad": 0.0})
OBJECTIVE = grpo_objective(max_response_tokens=8, loss_agg_mode="token-mean", entropy_coef=0.1)
SIZES = {
    "one": MicroBatching(micro_batch_size=1),
    "three": MicroBatching(micro_batch_size=3),
    "padded": MicroBatching(micro_batch_size=3, packed=False),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_hf(tmp_path_factory.mktemp("qwen3"), "qwen3", layers=4, width=0.15)


@pytest.fixture(scope="module")
def batch(folder):
    return lopsided_batch(folder, paired=False)


def megatrons_own(calls):
    """Megatron's attention and rotary embedding; sequences are told apart by a mask alone."""
    from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class Own(DotProductAttention):
        def forward(self, query, key, value, mask, *_, packed_seq_params, **__):
            calls.append(self.layer_number)
            bounds = packed_seq_params.cu_seqlens_q.long()
            lengths = bounds[1:] - bounds[:-1]
            segments = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
            positions = torch.arange(len(segments)) - bounds[:-1][segments]
            angles = RotaryEmbedding(self.config.kv_channels, 1.0, use_cpu_initialization=True)(512)
            query, key = (
                apply_rotary_pos_emb(x[:, None], angles[positions], self.config)
                for x in (query, key)
            )
            place = torch.arange(len(segments))
            hidden = (segments[:, None] != segments) | (place[:, None] < place)
            return super().forward(query, key, value[:, None], hidden[None, None])[:, 0]

    return Own


def step_job(layout, folder, batch, size, own):
    """Log-probs, metrics and gradient of a step; calls of Megatron's own attention."""
    from rl_megatron.models import gpt_model

    calls = []
    ours, gpt_model.CoreAttention = (
        gpt_model.CoreAttention,
        megatrons_own(calls) if own else gpt_model.CoreAttention,
    )
    try:
        backend = make_backend(
            folder, start(layout), SIZES[size], NO_CLIPPING, distributed_optimizer=False
        )
    finally:
        gpt_model.CoreAttention = ours
    logprobs = backend.logprobs(batch)
    metrics = backend.train_step(batch, OBJECTIVE, lr=0.0)
    gradients = gradients_of(backend)
    backend.close()
    return logprobs, metrics, gradients, len(calls)


@pytest.mark.parametrize(
    ("layout", "size"),
    [
        ("tp1", "one"),
        ("tp1", "three"),
        ("tp1", "padded"),
        ("tp2", "three"),
        ("tp2-sp", "padded"),
        ("pp2", "three"),
        ("pp2-vpp2", "one"),
        ("tp2-pp2-sp", "three"),
    ],
)
def test_a_step_is_that_of_megatrons_own_attention(layout, size, folder, batch, pool):
    ranks = [
        pool(LAYOUTS[layout].world_size).run(step_job, layout, folder, batch, size, own)
        for own in (False, True)
    ]
    for ours, own in zip(*ranks, strict=True):
        assert ours[3] == 0 < own[3]
        torch.testing.assert_close(ours[0], own[0], atol=2e-5, rtol=0)
        assert ours[1] == pytest.approx(own[1], rel=1e-5, abs=1e-8)
        for name, value in own[2].items():
            error = (ours[2][name] - value).norm() / value.norm()
            assert error <= 2e-5, name
