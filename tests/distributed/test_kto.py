"""KTO's step, its KL included, is the same under every layout, split and source of log-probs."""

import copy
from pathlib import Path

import pytest
import torch

from rl_megatron.checkpoint.ref_cache import Fingerprint, RefCache, RefCacheWriter
from rl_megatron.data.examples import JudgedExample
from rl_megatron.data.packing import MicroBatching, pack_judged
from rl_megatron.data.unpaired import borrow_responses
from rl_megatron.losses import kto_objective
from rl_megatron.runtime.evaluation import mismatch_kl
from tests.helpers.backend_contract import OPTIMIZER, TEMPERATURE, assert_close_weights, weights_of
from tests.helpers.megatron_job import LAYOUTS, make_backend, start
from tests.helpers.oracle import batch_logprobs, oracle_model
from tests.helpers.tiny_model import make_tiny_hf

FINGERPRINT = Fingerprint({"weights": "of this test"})
ONE = MicroBatching(micro_batch_size=1)
SPLITS = {
    "1": ONE,
    "all": MicroBatching(micro_batch_size=1000),
    "padded": MicroBatching(micro_batch_size=3, packed=False),
}
BETA, WEIGHTS = 0.5, {"desirable_weight": 1.33, "undesirable_weight": 1.0}
# Two steps: in the second the policy has moved, and the KL is not 0.
STEPS = [[5, 0, 3, 6, 1], [2, 4, 7, 0, 5]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_hf(tmp_path_factory.mktemp("qwen3"), "qwen3", layers=2, width=0.15)


@pytest.fixture(scope="module")
def rows():
    """Responses of unequal lengths; two rows share a prompt, and one has no token that counts."""
    generator = torch.Generator().manual_seed(0)

    def ids(low, high):
        count = int(torch.randint(low, high, (1,), generator=generator))
        return tuple(torch.randint(3, 131, (count,), generator=generator).tolist())

    made = [JudgedExample(row, ids(1, 9), ids(1, 12), row % 3 != 0) for row in range(8)]
    made[4] = JudgedExample(4, made[3].prompt_ids, made[4].response_ids, True)
    made[6] = JudgedExample(6, (), (9,), False)
    return borrow_responses(made, 20)


def steps_job(layout, folder, rows, split, cache):
    """Metrics with the KL, and weights, of each step; the reference from the cache if there is."""
    process = start(layout)
    policy = make_backend(folder, process, SPLITS[split], OPTIMIZER)
    if cache is None:
        reference = make_backend(folder, process, ONE, None)
    else:
        reference = RefCache.open(cache, FINGERPRINT, process)
    metrics, weights = [], []
    for numbers in STEPS:
        batch = pack_judged([rows[number] for number in numbers])
        kl = mismatch_kl(policy, reference, batch)
        scored = batch.rows.with_fields(ref_logprobs=reference.logprobs(batch.rows))
        objective = kto_objective(beta=BETA, kl=kl, **WEIGHTS)
        metrics.append(policy.train_step(scored, objective, lr=1e-2) | {"kl": kl})
        weights.append(weights_of(policy))
    return metrics, weights


def build_job(layout, folder, rows, cache):
    process = start(layout)
    reference = make_backend(folder, process, ONE, None)
    writer = RefCacheWriter(cache, FINGERPRINT, process)
    for part in pack_judged(rows).parts:
        missing = part.select(writer.missing(part))
        writer.add(missing, reference.logprobs(missing))
    writer.publish({})


@pytest.fixture(scope="module")
def expected(pool, folder, rows):
    (found,) = pool(1).run(steps_job, "tp1", folder, rows, "all", None)
    return found


def assert_same(found, expected):
    metrics, weights = found
    for row, want in zip(metrics, expected[0], strict=True):
        assert row.keys() == want.keys()
        for name, value in want.items():
            # Rewards and KL are differences of sums of up to 100 nats, of float32 log-probs.
            floor = 1e-6 if name.startswith("loss/") else 1e-5
            assert row[name] == pytest.approx(value, rel=2e-6, abs=floor), name
    assert_close_weights(weights[-1], expected[1][-1])


def test_the_steps_are_those_of_the_formula_in_float64(folder, rows, expected):
    (first, second), weights = expected
    # Nothing has moved: each loss is half its weight. Of 5 rows 2 are desirable, and one of the
    # others (row 6) has no token that counts.
    assert first["loss/kto"] == pytest.approx((2 * 1.33 + 2) / 2 / 4, rel=1e-6)
    assert first["kl"] == pytest.approx(0.0, abs=1e-6)
    batch = pack_judged([rows[number] for number in STEPS[1]])
    model = copy.deepcopy(oracle_model(folder))
    model.load_state_dict({name: value.double() for name, value in weights[0].items()})
    ratios = []
    for part in batch.parts:
        now, before = (batch_logprobs(m, part, TEMPERATURE) for m in (model, oracle_model(folder)))
        sums = (now - before).detach().split(part.lengths.tolist())
        ratios.append(torch.stack([values.sum() for values in sums]))
    kl = max(0.0, float(ratios[1].mean()))
    assert kl > 0.01
    assert second["kl"] == pytest.approx(kl, rel=1e-4)
    desirable = batch.rows.desirable
    above = torch.where(desirable, ratios[0] - kl, kl - ratios[0])
    losses = torch.where(desirable, 1.33, 1.0).double() * (1 - torch.sigmoid(BETA * above))
    assert second["loss/kto"] == pytest.approx(float(losses.mean()), rel=1e-5)
    chosen, rejected = (BETA * ratios[0][kind].mean() for kind in (desirable, ~desirable))
    assert second["rewards/chosen"] == pytest.approx(float(chosen), rel=1e-4)
    assert second["rewards/margins"] == pytest.approx(float(chosen - rejected), rel=1e-4)


@pytest.mark.parametrize("split", ["1", "padded"])
def test_micro_batches_change_nothing(pool, folder, rows, expected, split):
    (found,) = pool(1).run(steps_job, "tp1", folder, rows, split, None)
    assert_same(found, expected)


@pytest.mark.parametrize("layout", ["dp2", "tp2-sp", "pp2", "cp2", "dp4", "tp2-pp2"])
def test_layouts_change_nothing(pool, folder, rows, expected, layout):
    world_size = LAYOUTS[layout].world_size
    for found in pool(world_size).run(steps_job, layout, folder, rows, "1", None):
        assert_same(found, expected)


@pytest.mark.parametrize("layout", ["tp1", "dp2", "tp2", "pp2"])
def test_a_cache_of_another_layout_changes_nothing(
    pool, folder, rows, expected, layout, tmp_path_factory
):
    cache = Path(tmp_path_factory.mktemp("cache")) / "cache"
    pool(2).run(build_job, "dp2", folder, rows, cache)
    world_size = LAYOUTS[layout].world_size
    for found in pool(world_size).run(steps_job, layout, folder, rows, "1", cache):
        assert_same(found, expected)
