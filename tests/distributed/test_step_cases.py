"""Mini-batches that earlier frameworks got wrong, on ranks that hold unequal shares of them."""

import math

import pytest
import torch

from rl_megatron.advantages.whitening import whiten
from rl_megatron.data.packing import MicroBatching, plan_micro_batches
from rl_megatron.interfaces.batch import PackedBatch
from rl_megatron.losses import dpo_objective, grpo_objective, sft_objective
from rl_megatron.losses.sums import segment_sum
from tests.helpers.backend_contract import OPTIMIZER, TEMPERATURE, WHOLE, make_batch
from tests.helpers.megatron_job import (
    LAYOUTS,
    bits_of,
    gradients_of,
    make_backend,
    parameters_of,
    start,
)
from tests.helpers.oracle import batch_logprobs, oracle_model
from tests.helpers.tiny_model import make_tiny_hf

NO_CLIPPING = OPTIMIZER.model_copy(update={"clip_grad": 0.0})
ONE = MicroBatching(micro_batch_size=1)
OBJECTIVES = {
    "grpo": grpo_objective(max_response_tokens=8, use_kl_loss=True, kl_loss_coef=1.0),
    "token-mean": grpo_objective(max_response_tokens=8),
    "dpo": dpo_objective(beta=1.0),
    "dpo-nll": dpo_objective(beta=1.0, rpo_alpha=1.0),
    "sft": sft_objective(),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_hf(tmp_path_factory.mktemp("llama"), "llama", width=0.15)


def make_sequences(folder, responses, prompt=3, **more):
    """One sequence per response length (0: an empty mask behind 4 tokens), scored by the oracle.

    Old and reference log-probs are those of the model itself: every ratio is 1.
    """
    masks = [[False] * prompt + ([True] * n if n else [False] * 4) for n in responses]
    lengths = [len(mask) for mask in masks]
    generator = torch.Generator().manual_seed(1)
    batch = PackedBatch(
        tokens=torch.randint(3, 131, (sum(lengths),), generator=generator),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0),
        response_mask=torch.tensor([m for mask in masks for m in mask]),
        sequence_ids=torch.arange(len(masks)),
        advantages=torch.zeros(sum(lengths)),
        **more,
    )
    logprobs = batch_logprobs(oracle_model(folder), batch, TEMPERATURE).detach().float()
    return batch.with_fields(old_logprobs=logprobs, ref_logprobs=logprobs)


def step_job(layout, folder, batch, objective, micro_batching):
    """Metrics of one step and its gradient."""
    backend = make_backend(
        folder, start(layout), micro_batching, NO_CLIPPING, distributed_optimizer=False
    )
    metrics = backend.train_step(batch, OBJECTIVES[objective], lr=1e-3)
    return metrics, gradients_of(backend)


def run_step(pool, layout, *args):
    """The same on all ranks: metrics and gradient."""
    ranks = pool(LAYOUTS[layout].world_size).run(step_job, layout, *args)
    assert all(metrics == ranks[0][0] for metrics, _ in ranks)
    return ranks[0]


def assert_same_gradient(found, expected, bound=2e-5):
    off = {n: float((found[n] - g).norm() / g.norm()) for n, g in expected.items() if g.any()}
    assert off and max(off.values()) <= bound, off
    assert [n for n, g in expected.items() if not g.any() and found[n].any()] == []


SPREADS = [
    ("tp1", WHOLE),
    ("tp1", ONE),
    ("dp2", WHOLE),
    ("dp2", ONE),
    ("pp2", ONE),
    ("tp2-sp", ONE),
]


def test_grpo_01_token_mean_over_unequal_micro_batches_and_ranks(folder, pool):
    batch = make_sequences(folder, [2, 8])
    losses = torch.tensor([1.0, 3.0, *[0.5] * 8])
    # With ratio 1 the loss of a token is minus its advantage.
    advantages = torch.zeros(batch.num_tokens).masked_scatter(batch.response_mask, -losses)
    batch = batch.with_fields(advantages=advantages)
    outcomes = [run_step(pool, layout, folder, batch, "token-mean", s) for layout, s in SPREADS]
    for metrics, gradient in outcomes:
        assert metrics["loss/policy"] == pytest.approx(0.8, abs=1e-5)
        assert_same_gradient(gradient, outcomes[0][1])


def test_grpo_08_a_micro_batch_with_nothing_in_the_mask_changes_nothing(folder, pool):
    both = make_sequences(folder, [0, 2])
    advantages = torch.zeros(both.num_tokens)
    advantages[both.response_mask] = -torch.tensor([0.25, 0.75])
    both = both.with_fields(advantages=advantages)
    metrics, expected = run_step(pool, "tp1", folder, both.select([1]), "token-mean", WHOLE)
    assert metrics["loss/policy"] == pytest.approx(0.5, abs=1e-5)
    for layout, split in SPREADS:
        metrics, gradient = run_step(pool, layout, folder, both, "token-mean", split)
        assert metrics["loss/policy"] == pytest.approx(0.5, abs=1e-5)
        assert_same_gradient(gradient, expected)


def test_grpo_08_ranks_with_nothing_do_not_pull_the_kl_metric_to_zero(folder, pool):
    batch = make_sequences(folder, [3, 0, 3, 0])
    # k3(r) = e^r - 1 - r = 1.
    batch = batch.with_fields(ref_logprobs=batch.old_logprobs + 1.1461932206205825)
    for layout, split in [*SPREADS, ("dp4", ONE)]:
        metrics, _ = run_step(pool, layout, folder, batch, "grpo", split)
        assert metrics["loss/kl"] == pytest.approx(1.0, abs=1e-5)
        assert metrics["policy/ratio_max"] == pytest.approx(1.0, abs=1e-5)


def test_grpo_10_whitened_advantages_meet_their_tokens_under_context_parallelism(folder, pool):
    """Of 8 tokens the first rank of two holds 0, 1, 6 and 7: a half of every response's."""
    values = whiten(torch.tensor([1.0, 2.0, 3.0, 4.0]).double(), torch.ones(4), adv_eps=0.0)
    ratios = torch.tensor([1.1, 0.9, 1.05, 0.95])
    expected = float(-(ratios * values).mean())
    # One response of four tokens, as in the case, and four of one.
    for batch in (make_sequences(folder, [4], prompt=4), make_sequences(folder, [1] * 4, prompt=1)):
        mask, old = batch.response_mask, batch.old_logprobs.clone()
        old[mask] -= ratios.log()
        advantages = torch.zeros(8).masked_scatter(mask, values.float())
        batch = batch.with_fields(old_logprobs=old, advantages=advantages)
        _, gradient = run_step(pool, "tp1", folder, batch, "token-mean", WHOLE)
        for layout in ("tp1", "cp2", "cp2-tp2-sp"):
            metrics, found = run_step(pool, layout, folder, batch, "token-mean", WHOLE)
            assert metrics["loss/policy"] == pytest.approx(expected, abs=1e-5)
            assert_same_gradient(found, gradient)


def sums_job(layout, folder, batch, micro_batching):
    """Sum of each sequence's log-probs."""
    backend = make_backend(folder, start(layout), micro_batching, optimizer=None)
    return segment_sum(backend.logprobs(batch), batch.cu_seqlens)


@pytest.mark.parametrize("layout", ["tp1", "tp2-sp", "cp2", "cp2-tp2-sp", "pp2", "dp2"])
def test_dpo_13_packed_sequences_with_a_tail_keep_to_themselves(layout, folder, pool):
    """Lengths 3, 2 and 4, prompts 1, 1 and 2; the layouts add tails, which are no sequence."""
    assert LAYOUTS["cp2"].tail(9) == 3
    mask = [False, True, True, False, True, False, False, True, True]
    batch = PackedBatch(
        tokens=torch.arange(20, 29),
        cu_seqlens=torch.tensor([0, 3, 5, 9]),
        response_mask=torch.tensor(mask),
        sequence_ids=torch.arange(3),
    )
    want = batch_logprobs(oracle_model(folder), batch, TEMPERATURE).detach()
    sums = torch.stack([want[0:3].sum(), want[3:5].sum(), want[5:9].sum()])
    padded = MicroBatching(micro_batch_size=3, packed=False)
    for split in (WHOLE, padded, ONE):
        for found in pool(LAYOUTS[layout].world_size).run(sums_job, layout, folder, batch, split):
            torch.testing.assert_close(found, sums, atol=2e-5, rtol=0, check_dtype=False)


def nothing_job(layout, folder, batch, objective):
    """A real step, so that Adam has momentum, then one on nothing; whether it left any trace."""
    backend = make_backend(folder, start(layout), ONE)
    backend.train_step(make_batch(paired=batch.paired), sft_objective(), lr=1e-3)
    before = parameters_of(backend)
    metrics = backend.train_step(batch, OBJECTIVES[objective], lr=1e-3)
    same = all(map(torch.equal, bits_of(before), bits_of(parameters_of(backend))))
    return metrics, same


def without_a_counted_token(folder, objective):
    """No response at all; for DPO a response each, but to no pair a second one."""
    if objective == "dpo-nll":
        return make_sequences(folder, [3, 0, 0, 2], paired=True)
    return make_sequences(folder, [0, 0])


@pytest.mark.parametrize("objective", ["grpo", "sft", "dpo-nll"])
@pytest.mark.parametrize("layout", ["tp1", "tp2-sp", "pp2", "dp2"])
def test_grpo_08_a_batch_without_a_valid_token_is_no_step(layout, objective, folder, pool):
    batch = without_a_counted_token(folder, objective)
    for metrics, same in pool(LAYOUTS[layout].world_size).run(
        nothing_job, layout, folder, batch, objective
    ):
        assert metrics["loss/total"] == 0.0
        assert metrics["optimizer/grad_norm"] == 0.0
        assert metrics["optimizer/skipped"] == 1.0
        assert all(map(math.isfinite, metrics.values()))
        assert same


def test_a_rank_with_nothing_at_all_takes_part(folder, pool):
    batch = make_sequences(folder, [5])
    want, expected = run_step(pool, "tp1", folder, batch, "sft", WHOLE)
    for layout in ("dp2", "dp4", "tp2-dp2", "pp2"):
        metrics, gradient = run_step(pool, layout, folder, batch, "sft", WHOLE)
        assert metrics == pytest.approx(want, rel=1e-5)
        assert_same_gradient(gradient, expected)


def test_dpo_09_a_rank_with_only_the_invalid_pair(folder, pool):
    # The first pair is as long as the others together, so it gets a rank of its own.
    batch = make_sequences(folder, [60, 0, 2, 3, 4, 2], prompt=2, paired=True)
    dealt = plan_micro_batches(batch.lengths.tolist(), True, 2, MicroBatching(micro_batch_size=2))
    assert sorted(dealt) == [[[0, 1]], [[2, 3, 4, 5]]]
    ref_logprobs = batch.ref_logprobs.clone()
    for pair, loss in ((1, 0.4), (2, 0.6)):
        # -ln sigmoid(margin) = loss; the chosen response's first token carries the margin.
        margin = -math.log(math.exp(loss) - 1)
        ref_logprobs[batch.token_index([2 * pair])[2]] -= margin
    # What stands in the invalid pair must not matter.
    ref_logprobs[: int(batch.cu_seqlens[2])] = math.nan
    batch = batch.with_fields(ref_logprobs=ref_logprobs)
    outcomes = []
    for layout, size in (("tp1", 3), ("tp1", 1), ("dp2", 2), ("dp4", 1), ("pp2", 1)):
        split = MicroBatching(micro_batch_size=size)
        metrics, gradient = run_step(pool, layout, folder, batch, "dpo", split)
        assert metrics["loss/dpo"] == pytest.approx(0.5, abs=1e-5)
        # A loss below ln 2 = 0.693 is a margin above 0.
        assert metrics["rewards/accuracies"] == 1.0
        outcomes.append(gradient)
        assert_same_gradient(gradient, outcomes[0])
