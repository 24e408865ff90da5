"""The comparison of `make parity` finds what it is there to find."""

import math
from dataclasses import replace

import pytest
import torch

from rl_megatron.losses import LOSS_AGG_MODES
from tools.parity import (
    GRADIENT_BOUND,
    METRIC_BOUND,
    METRIC_FLOOR,
    Difference,
    check_reference,
    compare,
    make_report,
    make_table,
)
from tools.parity_cases import (
    CASES,
    REFERENCES,
    ROWS,
    lonely,
    make_batches,
    make_model,
    model_logprobs,
    reference_of,
)

GRADIENTS = {"small": torch.tensor([3e-6, 4e-6]), "large": torch.tensor([300.0, 400.0])}
METRICS = {"loss/total": 2.0, "a": -4.0, "zero": 0.0}
FINE = Difference(0.0, "large", 0.0, 0.0, "a")


def changed(metrics=None, gradients=None):
    return compare((METRICS | (metrics or {}), GRADIENTS | (gradients or {})), (METRICS, GRADIENTS))


def test_equal_results_have_no_difference():
    found = changed()
    assert (found.gradient, found.loss, found.metric) == (0, 0, 0)
    assert found.within_bounds


@pytest.mark.parametrize("name", GRADIENTS)
def test_each_gradient_is_measured_by_its_own_norm(name):
    norm = float(GRADIENTS[name].norm())
    for times, within in ((0.9, True), (1.1, False)):
        off = GRADIENTS[name] + torch.tensor([0.0, times * GRADIENT_BOUND * norm])
        found = changed(gradients={name: off})
        assert found.parameter == name
        assert found.gradient == pytest.approx(times * GRADIENT_BOUND, rel=0.01)
        assert found.within_bounds is within


def test_loss_and_metrics_are_relative_down_to_a_floor():
    for times, within in ((0.9, True), (1.1, False)):
        step = times * METRIC_BOUND
        loss = changed({"loss/total": 2 * (1 + step)})
        assert loss.loss == pytest.approx(step, rel=1e-3)
        metric = changed({"a": -4 * (1 - step)})
        assert (metric.metric_name, metric.metric) == ("a", pytest.approx(step, rel=1e-3))
        tiny = changed({"zero": METRIC_FLOOR * step})
        assert (tiny.metric_name, tiny.metric) == ("zero", pytest.approx(step, rel=1e-3))
        assert loss.within_bounds is metric.within_bounds is tiny.within_bounds is within


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_or_not_there_is_infinitely_far(bad):
    assert changed({"loss/total": bad}).loss == math.inf
    assert changed({"a": bad}).metric == math.inf
    assert changed({"new": 1.0}).metric == math.inf
    assert changed(gradients={"small": torch.tensor([bad, 0.0])}).gradient == math.inf
    assert changed(gradients={"new": torch.zeros(2)}).gradient == math.inf
    assert changed(gradients={"small": torch.zeros(1)}).gradient == math.inf


def test_a_gradient_that_should_be_zero_must_be():
    zero = {"unused": torch.zeros(2)}
    assert compare((METRICS, zero), (METRICS, zero)).gradient == 0
    assert not compare((METRICS, {"unused": torch.full((2,), 1e-9)}), (METRICS, zero)).within_bounds


@pytest.mark.parametrize("field", ["gradient", "loss", "metric"])
def test_one_cell_beyond_its_bound_fails_the_whole(field):
    differences = {row: {case.name: FINE for case in CASES} for row in ("x", "y")}
    report = make_report(differences, seconds=1.0)
    assert report["equal"] and len(report["rows"]) == 2 * len(CASES)
    differences["y"][CASES[7].name] = replace(FINE, **{field: 3e-5})
    report = make_report(differences, seconds=1.0)
    assert not report["equal"]
    assert report[f"worst_{field}"] == 3e-5
    red = [
        cell for column in make_table(differences).columns for cell in column.cells if "[" in cell
    ]
    assert red == ["[bold red]3.0e-5[/]"]


@pytest.mark.parametrize(
    "broken", [{"loss": 0.0}, {"gradients": {}}, {"gradients": {"a": torch.zeros(2)}}]
)
def test_a_reference_of_zeros_is_refused(broken):
    loss, gradients = broken.get("loss", 1.0), broken.get("gradients", GRADIENTS)
    check_reference({"fine": (METRICS, GRADIENTS)})
    with pytest.raises(ValueError, match="its name: .*proves nothing"):
        check_reference(
            {"fine": (METRICS, GRADIENTS), "its name": ({"loss/total": loss}, gradients)}
        )


def test_every_loss_under_every_aggregation_on_every_axis():
    assert len({case.name for case in CASES}) == len(CASES)
    assert len({row.name for row in (*ROWS, *REFERENCES)}) == len(ROWS) + len(REFERENCES)
    aggregations = {}
    for case in CASES:
        aggregations.setdefault(case.loss, []).append(case.aggregation)
    assert list(aggregations.values()).count(list(LOSS_AGG_MODES)) == 7
    assert len(aggregations) == 7 + 3 + 1
    layouts = [row.layout for row in ROWS]
    for axis in ("tensor", "pipeline", "virtual", "context", "expert", "data"):
        assert max(getattr(layout, axis) for layout in layouts) == 2
    assert max(layout.world_size for layout in layouts) == 4
    for row in ROWS:
        reference = reference_of(row)
        assert reference.layout.world_size == 1 and not reference.micro_batching.packed


def test_batches_are_ragged_and_reach_the_bounds(tmp_path):
    model = make_model(tmp_path, "dense")
    batches = make_batches(model)
    plain = batches[False]
    mask = plain.response_mask
    responses = [int(part.sum()) for part in mask.split(plain.lengths.tolist())]
    assert min(responses) == 0 and len(set(responses)) == len(responses)
    assert int(lonely(batches)[False].response_mask.sum()) == max(responses)
    for case in CASES:
        batch = case.batch(batches)
        assert batch.paired == case.paired
        assert bool((case.objective.weigh(batch).loss_weights != 0).any())
        # A weight that masks everything would leave nothing to compare.
        for some in (batches, lonely(batches)):
            part = case.batch(some)
            kept = part.advantages[part.response_mask] != 0
            assert bool(kept.any())
            if case.weights.get("rollout_is") == "mask" and some is batches:
                assert not bool(kept.all())
    logprobs = model_logprobs(model, plain)
    assert float(logprobs[mask].min()) > -8
    gain = plain.advantages[mask] > 0
    ratio = (logprobs - plain.old_logprobs)[mask].exp()
    assert bool((ratio[gain] > 1.2).any()) and bool((ratio[~gain] < 0.8).any())
    assert bool((ratio[~gain] > 1.2).any())
    weight = (plain.old_logprobs - plain.rollout_logprobs)[mask].exp()
    assert float(weight.max()) > 2
