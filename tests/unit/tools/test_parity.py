"""The comparison of `make parity` finds what it is there to find."""

import math
from dataclasses import replace

import pytest
import torch

from rl_megatron.losses import LOSS_AGG_MODES
from tools.parity import describe, make_report, make_table
from tools.parity_cases import (
    BALANCED,
    CASES,
    EVERY_LOSS,
    LOSSES,
    REFERENCES,
    ROWS,
    SCORE_CASES,
    reference_of,
)
from tools.parity_compare import BOUNDS, METRIC_FLOOR, Difference, check_reference, compare
from tools.parity_data import SCORES, lonely, make_batches, make_model, model_logprobs

EXACT, BF16 = BOUNDS[torch.float32], BOUNDS[torch.bfloat16]
GRADIENTS = {"small": torch.tensor([3e-6, 4e-6]), "large": torch.tensor([300.0, 400.0])}
METRICS = {"loss/total": 2.0, "a": -4.0, "zero": 0.0}
FINE = Difference(0.0, "large", 0.0, 0.0, "a")


def changed(metrics=None, gradients=None):
    return compare((METRICS | (metrics or {}), GRADIENTS | (gradients or {})), (METRICS, GRADIENTS))


def test_equal_results_have_no_difference():
    found = changed()
    assert (found.gradient, found.loss, found.metric) == (0, 0, 0)
    assert found.within(EXACT)


@pytest.mark.parametrize("name", GRADIENTS)
def test_each_gradient_is_measured_by_its_own_norm(name):
    norm = float(GRADIENTS[name].norm())
    for times, within in ((0.9, True), (1.1, False)):
        off = GRADIENTS[name] + torch.tensor([0.0, times * EXACT.gradient * norm])
        found = changed(gradients={name: off})
        assert found.parameter == name
        assert found.gradient == pytest.approx(times * EXACT.gradient, rel=0.01)
        assert found.within(EXACT) is within


def test_loss_and_metrics_are_relative_down_to_a_floor():
    for times, within in ((0.9, True), (1.1, False)):
        step = times * EXACT.metric
        loss = changed({"loss/total": 2 * (1 + step)})
        assert loss.loss == pytest.approx(step, rel=1e-3)
        metric = changed({"a": -4 * (1 - step)})
        assert (metric.metric_name, metric.metric) == ("a", pytest.approx(step, rel=1e-3))
        tiny = changed({"zero": METRIC_FLOOR * step})
        assert (tiny.metric_name, tiny.metric) == ("zero", pytest.approx(step, rel=1e-3))
        for found in (loss, metric, tiny):
            assert found.within(EXACT) is within


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
    tiny = {"unused": torch.full((2,), 1e-9)}
    assert not compare((METRICS, tiny), (METRICS, zero)).within(BF16)


MEGATRON = [row for row in ROWS if row.backend == "megatron"]
FLOAT_ROW, BF16_ROW = ROWS[0], next(row for row in ROWS if row.is_bf16)
YARDSTICK = {"dense": {case.name: replace(FINE, gradient=0.5) for case in EVERY_LOSS}}


@pytest.mark.parametrize("field", ["gradient", "loss", "metric"])
@pytest.mark.parametrize(
    ("row", "suffix", "off", "shown"),
    [(FLOAT_ROW, "", 3e-5, "3.0e-5"), (BF16_ROW, "_bf16", 0.2, "2.0e-1")],
)
def test_one_cell_beyond_its_bound_fails_the_whole(row, suffix, off, shown, field):
    differences = {row: {case.name: FINE for case in row.cases} for row in (FLOAT_ROW, BF16_ROW)}
    report = make_report(differences, YARDSTICK, seconds=1.0)
    assert report["equal"] and len(report["rows"]) == len(CASES) + len(EVERY_LOSS)
    differences[row][EVERY_LOSS[3].name] = replace(FINE, **{field: off})
    report = make_report(differences, YARDSTICK, seconds=1.0)
    assert not report["equal"] and "NOT EQUAL" in describe(report)
    assert report[f"worst_{field}{suffix}"] == off
    assert report["bf16_from_float32"]["dense"]["worst_gradient"] == 0.5
    table = make_table(differences, YARDSTICK)
    red = [cell for column in table.columns for cell in column.cells if "[" in cell]
    assert red == [f"[bold red]{shown}[/]"]


def test_what_is_no_more_than_bf16_is_no_fault_in_bf16_only():
    off = {name: value * (1 + 0.9 * BF16.gradient) for name, value in GRADIENTS.items()}
    found = changed({"a": -4 * (1 + 0.9 * BF16.metric)}, off)
    assert found.within(BF16) and not found.within(EXACT)
    assert not changed(gradients={"large": 2 * GRADIENTS["large"]}).within(BF16)


def test_every_loss_is_compared_in_bf16_under_one_aggregation_or_another():
    assert (*(case.loss for case in EVERY_LOSS), "reward model") == LOSSES
    assert {case.aggregation for case in EVERY_LOSS} >= set(LOSS_AGG_MODES)
    layouts = [row.layout for row in MEGATRON if row.is_bf16]
    for axis in ("tensor", "pipeline", "context", "expert", "data"):
        assert {getattr(layout, axis) for layout in layouts} == {1, 2}
    assert {layout.sequence_parallel for layout in layouts} == {False, True}


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
    assert len(aggregations) == 7 + 4 + 2
    layouts = [row.layout for row in MEGATRON]
    for axis in ("tensor", "pipeline", "virtual", "context", "expert", "data"):
        assert max(getattr(layout, axis) for layout in layouts) == 2
    assert max(layout.world_size for layout in layouts) == 4
    for row in ROWS:
        reference = reference_of(row)
        assert reference.layout.world_size == 1 and not reference.micro_batching.packed
        assert reference.dtype == row.dtype


def test_every_backend_is_compared_with_one_rank_of_megatron():
    assert {row.backend for row in ROWS} == {"megatron", "deepspeed", "torch"}
    assert {row.backend for row in REFERENCES} == {"megatron"}
    for stage in (0, 1, 2, 3):
        rows = [row for row in ROWS if row.backend == "deepspeed" and row.zero_stage == stage]
        names = {case.name for row in rows for case in row.cases}
        assert names == {case.name for case in (*CASES, *SCORE_CASES)}
        assert {row.micro_batching.packed for row in rows} == {row.lonely for row in rows}
        # DeepSpeed would add up gradients in bf16 at stage 0.
        assert any(row.is_bf16 for row in rows) == (stage > 0)
        assert any(row.model == "experts" for row in rows) == (stage > 1)
    sizes = {row.layout.data for row in ROWS if row.zero_stage == 3}
    assert sizes == {2, 3}


def test_the_balance_of_experts_is_compared_where_tokens_and_layers_are_spread():
    rows = [row for row in ROWS if row.balance]
    assert all(row.model == "experts" and row.cases == BALANCED for row in rows)
    assert len(BALANCED) == 3 and {case.paired for case in BALANCED} == {True, False}
    for axis in ("tensor", "pipeline", "virtual", "context", "expert", "data"):
        assert {getattr(row.layout, axis) for row in rows} == {1, 2}
    assert (
        {row.lonely for row in rows} == {row.micro_batching.packed for row in rows} == {True, False}
    )
    assert all(reference_of(row).balance for row in rows)


def test_a_scalar_head_is_compared_on_every_axis(tmp_path):
    rows = [row for row in MEGATRON if row.model == "scores"]
    assert all(row.cases == SCORE_CASES and not row.is_bf16 for row in rows)
    for axis in ("tensor", "pipeline", "virtual", "context", "data"):
        assert {getattr(row.layout, axis) for row in rows} == {1, 2}
    assert {row.lonely for row in rows} == {True, False}
    assert all(reference_of(row).model == "scores" for row in rows)
    model = make_model(tmp_path, "scores")
    batches = make_batches(model)
    assert list(batches) == [True] and batches[True].margins.tolist()[::2] == [0.5, 0.0, 1.0, -0.5]
    assert lonely(batches)[True].num_sequences == 2
    model.config.pad_token_id = None
    with torch.no_grad():
        sequences = batches[True].tokens.split(batches[True].lengths.tolist())
        scores = [float(model(tokens[None]).logits[0, 0]) for tokens in sequences]
    assert scores == pytest.approx(SCORES, abs=1e-5)


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


@torch.no_grad()
def test_no_token_lies_between_two_experts(tmp_path):
    """Where one does, the rounding of bf16 sends it to either, and rows are off by 0.45."""
    model = make_model(tmp_path, "experts")
    batch = make_batches(model)[False]
    sequences = batch.tokens.split(batch.lengths.tolist())
    logits = [model(tokens[None], output_router_logits=True).router_logits for tokens in sequences]
    for layer in zip(*logits, strict=True):
        found = torch.cat(layer).topk(4)
        assert len(found.values) == batch.num_tokens == 95
        assert float((found.values[:, 2] - found.values[:, 3]).min()) > 0.02
        assert int(found.indices[:, :3].flatten().bincount(minlength=8).min()) >= 20
