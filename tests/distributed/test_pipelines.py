"""CK-10: uneven and virtual pipeline stages hold every layer once, and give one rank's numbers."""

import pytest
import torch

from rl_megatron.data.packing import MicroBatching
from rl_megatron.interfaces.records import Sampling
from rl_megatron.losses import grpo_objective
from tests.helpers.backend_contract import OPTIMIZER, make_batch
from tests.helpers.engine_contract import PROMPTS, ids_of
from tests.helpers.megatron_job import LAYOUTS, gradients_of, make_backend, start
from tests.helpers.tiny_model import make_tiny_hf

GREEDY = Sampling(temperature=0.0, max_response_tokens=6, stop_token_ids=())
# Layers of each stage, in the order in which it computes them.
STAGES = {
    "pp2-uneven": [[0, 1, 2], [3, 4, 5, 6, 7]],
    "pp4-uneven": [[0], [1, 2], [3, 4], [5, 6, 7]],
    "pp2-vpp2": [[0, 1, 4, 5], [2, 3, 6, 7]],
    "pp2-vpp2-uneven": [[0, 1, 2, 4, 5, 6], [3, 7]],
    "pp2-vpp2-last": [[0, 1, 2, 4, 5, 6], [3, 7]],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_hf(tmp_path_factory.mktemp("deep"), "qwen3", layers=8, tie=True, width=0.1)


def whole_job(layout, folder):
    """Numbers of this rank's layers, logits, greedy text, and a step: metrics and gradients."""
    from rl_megatron.rollout.megatron import MegatronEngine

    process = start(layout)
    backend = make_backend(
        folder,
        process,
        MicroBatching(micro_batch_size=2),
        OPTIMIZER.model_copy(update={"clip_grad": 0.0}),
        distributed_optimizer=False,
        temperature=1.0,
    )
    layers = [layer.layer_number - 1 for chunk in backend.chunks for layer in chunk.decoder.layers]
    engine = MegatronEngine(backend.chunks, process, str, 64)
    logits = engine.logits([prompt.token_ids for prompt in PROMPTS])
    text = ids_of(engine.generate(PROMPTS, GREEDY, 1, seed=0))
    batch = make_batch()
    batch = batch.with_fields(old_logprobs=backend.logprobs(batch), advantages=batch.advantages + 1)
    metrics = backend.train_step(batch, grpo_objective(max_response_tokens=8), lr=1e-3)
    return layers, logits, text, metrics, gradients_of(backend)


def interleaved_job(layout, folder):
    process = start(layout)
    config = make_backend(folder, process, optimizer=None).chunks[0].config
    return config.virtual_pipeline_model_parallel_size, config.batch_p2p_comm


@pytest.mark.parametrize("layout", ["pp2", "pp2-vpp2"])
def test_chunks_never_go_with_batched_sends(layout, folder, pool):
    """Between two stages they would swap what goes forward and what comes back, in silence."""
    for chunks, batched in pool(2).run(interleaved_job, layout, folder):
        assert batched is (chunks is None)


@pytest.fixture(scope="module")
def at_one_rank(folder, pool):
    return pool(1).run(whole_job, "tp1", folder)[0]


@pytest.mark.parametrize("layout", STAGES)
def test_ck_10_stages_hold_their_layers_and_give_the_numbers_of_one_rank(
    layout, folder, at_one_rank, pool
):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = [model(torch.tensor([prompt.token_ids])).logits[0] for prompt in PROMPTS]
    ranks = pool(LAYOUTS[layout].world_size).run(whole_job, layout, folder)
    assert [rank[0] for rank in ranks] == STAGES[layout]
    _, _, text, metrics, gradients = at_one_rank
    for _, found_logits, found_text, found_metrics, found in ranks:
        assert (found_logits - torch.cat(logits)).abs().max() <= 2e-5
        assert found_text == text
        assert found_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-8)
        assert sorted(found) == sorted(gradients)
        for name, value in found.items():
            error = (value - gradients[name]).norm() / gradients[name].norm()
            assert error <= 2e-5, name
