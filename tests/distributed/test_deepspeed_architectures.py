"""ZeRO over models that no family of ours describes: weights, sampling, and going on."""

import pytest
import torch

from rl_megatron.data.packing import pack_rollouts
from rl_megatron.losses import sft_objective
from rl_megatron.models.transformers_model import load_transformers_model, named_weights
from rl_megatron.parallel.process import start_data_parallel
from rl_megatron.rollout.hf import HFEngine
from rl_megatron.weight_sync import InProcessSync
from tests.helpers.architectures import make_architecture
from tests.helpers.backend_contract import CLOSE, assert_same_weights, make_batch, weights_of
from tests.helpers.deepspeed_job import make_deepspeed
from tests.helpers.engine_contract import PROMPTS, STOPS, make_sampling


def whole_life_job(folder, stage, saved):
    """Loaded, stepped, sampled from, saved, and gone on with from there."""
    process = start_data_parallel()
    policy = make_deepspeed(folder, process, stage)
    loaded = dict(named_weights(load_transformers_model(folder, torch.float32, process.device)))
    assert_same_weights(dict(sorted(weights_of(policy).items())), dict(sorted(loaded.items())))
    policy.train_step(make_batch(), sft_objective(), 1e-2)

    model, is_own = policy.model_to_sample_from()
    with InProcessSync(policy, HFEngine(model, process, str, 64, is_own)).sampling(1) as engine:
        batch = pack_rollouts(engine.generate(PROMPTS, make_sampling(), 3, seed=0), STOPS)
    torch.testing.assert_close(policy.logprobs(batch), batch.rollout_logprobs, **CLOSE)

    if process.is_main:
        saved.mkdir()
    process.barrier()
    policy.save(saved).finish()
    process.barrier()
    again = make_deepspeed(folder, process, stage)
    again.load(saved)
    assert_same_weights(weights_of(again), weights_of(policy))
    metrics = [b.train_step(make_batch(), sft_objective(), 1e-2) for b in (policy, again)]
    assert metrics[0] == metrics[1]
    policy.close()
    again.close()


# Learned positions and a tied head; a head with a bias; experts, and a buffer that is a weight.
@pytest.mark.parametrize("model_type", ["gpt2", "phi", "deepseek_v3"])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_whole_life(stage, model_type, pool, tmp_path):
    folder = make_architecture(tmp_path / "model", model_type)
    pool(2).run(whole_life_job, folder, stage, tmp_path / "saved")
