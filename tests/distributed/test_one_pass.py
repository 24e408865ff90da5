"""The head's gradient taken in the forward pass is that of the backward pass, on every layout."""

import pytest
import torch

from rl_megatron.data.packing import MicroBatching
from rl_megatron.losses import dpo_objective, grpo_objective, sft_objective
from tests.helpers.backend_contract import OPTIMIZER, lopsided_batch
from tests.helpers.megatron_job import gradients_of, make_backend, start
from tests.helpers.recomputed import count_recomputed
from tests.helpers.tiny_model import make_tiny_hf

NO_CLIPPING = OPTIMIZER.model_copy(update={"clip_grad": 0.0})
OBJECTIVES = {
    "sft": sft_objective(),
    "grpo": grpo_objective(
        max_response_tokens=8, use_kl_loss=True, kl_loss_coef=0.1, entropy_coef=0.01
    ),
    "cispo": grpo_objective(
        max_response_tokens=8, loss_mode="cispo", loss_agg_mode="seq-mean-token-mean"
    ),
}
SIZES = {"tp1": 1, "tp2": 2, "tp2-sp": 2, "cp2": 2, "pp2": 2, "cp2-tp2-sp": 4}


def steps_job(layout, folder, batch, kinds=tuple(OBJECTIVES)):
    """By objective and mode: metrics and gradient of a step, and how many rows were done twice."""
    process = start(layout)
    found = {}
    for kind in kinds:
        for one_pass in (False, True):
            backend = make_backend(
                folder,
                process,
                MicroBatching(micro_batch_size=3),
                NO_CLIPPING,
                distributed_optimizer=False,
                one_pass=one_pass,
            )
            with pytest.MonkeyPatch.context() as patch:
                recomputed = count_recomputed(patch)
                metrics = backend.train_step(batch, OBJECTIVES[kind], lr=1e-3)
            found[kind, one_pass] = metrics, gradients_of(backend), sum(recomputed)
            backend.close()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_hf(tmp_path_factory.mktemp("qwen3"), "qwen3", layers=2, width=0.15, tie=True)


@pytest.mark.parametrize("layout", SIZES)
def test_one_pass_gives_the_numbers_of_two(pool, folder, layout):
    batch = lopsided_batch(folder, paired=False)
    for found in pool(SIZES[layout]).run(steps_job, layout, folder, batch):
        for kind in OBJECTIVES:
            (metrics, gradients, rows), (hot_metrics, hot_gradients, hot_rows) = (
                found[kind, one_pass] for one_pass in (False, True)
            )
            norm = "optimizer/grad_norm"
            assert hot_metrics.pop(norm) == pytest.approx(metrics.pop(norm), rel=1e-6)
            assert hot_metrics == metrics
            for name, gradient in gradients.items():
                difference = (hot_gradients[name] - gradient).norm() / gradient.norm()
                assert float(difference) < 2e-6, name
            # Only the last stage has a head.
            assert hot_rows == 0 and (rows > 0 or layout == "pp2")


def pairs_job(folder, batch):
    process = start("tp1")
    backend = make_backend(folder, process, optimizer=NO_CLIPPING, one_pass=True)
    with pytest.MonkeyPatch.context() as patch:
        recomputed = count_recomputed(patch)
        backend.train_step(batch, dpo_objective(), lr=1e-3)
    return sum(recomputed)


def test_a_loss_of_whole_sequences_takes_two_passes(pool, folder):
    batch = lopsided_batch(folder, paired=True)
    (rows,) = pool(1).run(pairs_job, folder, batch)
    assert rows == int(batch.response_mask.sum())


def test_the_torch_backend_takes_one_pass_too(folder):
    from rl_megatron.backends.torch import TorchBackend
    from rl_megatron.parallel.process import start_data_parallel

    batch = lopsided_batch(folder, paired=False)
    found = {}
    for one_pass in (False, True):
        backend = TorchBackend(
            folder,
            start_data_parallel(),
            MicroBatching(micro_batch_size=3),
            optimizer=OPTIMIZER,
            one_pass=one_pass,
        )
        with pytest.MonkeyPatch.context() as patch:
            recomputed = count_recomputed(patch)
            metrics = backend.train_step(batch, OBJECTIVES["grpo"], lr=1e-3)
        found[one_pass] = metrics, {n: w.clone() for n, w in backend.named_weights()}
        assert (sum(recomputed) == 0) == one_pass
    assert found[True][0] == pytest.approx(found[False][0], rel=1e-6)
    for name, weight in found[False][1].items():
        torch.testing.assert_close(found[True][1][name], weight, atol=1e-6, rtol=1e-5)


def built_job(folder, batch, backend, one_pass):
    """Rows done twice in a step of a model built from its settings, and which kernels it asked."""
    from rl_megatron.config import SFTRun, build_run
    from rl_megatron.kernels import linear_logprob
    from rl_megatron.runtime.build import build_policy
    from tests.helpers.minimal_runs import SFT, with_settings

    process = start("tp1")
    settings = {
        "backend": backend,
        "model__path": str(folder),
        "kernels": {"linear_logprob": "torch", "one_pass": one_pass},
    }
    run = build_run(SFTRun, with_settings(SFT, **settings))
    policy = build_policy(run, process, MicroBatching(micro_batch_size=3))
    asked = set()
    row_kernels = linear_logprob.row_kernels

    def noted(name, *arguments):
        asked.add(name)
        return row_kernels(name, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        recomputed = count_recomputed(patch)
        patch.setattr(linear_logprob, "row_kernels", noted)
        policy.train_step(batch, sft_objective(), lr=0.0)
    policy.close()
    return sum(recomputed), asked


@pytest.mark.parametrize("backend", ["megatron", "torch"])
@pytest.mark.parametrize("one_pass", [False, True])
def test_the_settings_of_kernels_reach_the_head(pool, folder, backend, one_pass):
    batch = lopsided_batch(folder, paired=False)
    ((rows, asked),) = pool(1).run(built_job, folder, batch, backend, one_pass)
    assert asked == {"torch"}
    assert rows == (0 if one_pass else int(batch.response_mask.sum()))
