from typing import get_args, get_type_hints

import pytest
import torch

from rl_megatron.config.loss import GRPOLossConfig
from rl_megatron.errors import ConfigError
from rl_megatron.losses.aggregate import LOSS_AGG_MODES, aggregation_weights, totals, valid_pairs
from tests.helpers.packed import packed, random_masks


def aggregate(batch, per_token_loss, mode, max_response_tokens=8):
    weights = aggregation_weights(batch.cu_seqlens, batch.response_mask, mode, max_response_tokens)
    assert weights.dtype == torch.float32
    return float((weights.double() * torch.tensor(per_token_loss, dtype=torch.float64)).sum())


def oracle(masks, losses, mode, max_response_tokens):
    """The five definitions in plain Python; `losses` is a list of lists like `masks`."""
    kept = [[x for x, m in zip(*row, strict=True) if m] for row in zip(losses, masks, strict=True)]
    kept = [row for row in kept if row]
    every = [x for row in kept for x in row]
    if not every:
        return 0.0
    return {
        "token-mean": sum(every) / len(every),
        "seq-mean-token-mean": sum(sum(row) / len(row) for row in kept) / len(kept),
        "seq-mean-token-sum": sum(every) / len(kept),
        "seq-mean-token-sum-norm": sum(every) / (len(kept) * max_response_tokens),
        "token-sum": sum(every),
    }[mode]


def test_grpo_01_token_mean_over_unequal_micro_batches():
    batch = packed([[0, 1, 1], [0] + [1] * 8])
    weights = aggregation_weights(batch.cu_seqlens, batch.response_mask, "token-mean")
    assert weights[batch.response_mask].tolist() == pytest.approx([0.1] * 10)
    losses = torch.tensor([9, 1.0, 3.0, 9] + [0.5] * 8)
    shares = [float((weights[part] * losses[part]).sum()) for part in (slice(0, 3), slice(3, 12))]
    assert shares == pytest.approx([0.4, 0.4])
    assert sum(shares) == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 1.75),
        ("seq-mean-token-mean", 2.5),
        ("seq-mean-token-sum", 3.5),
        ("seq-mean-token-sum-norm", 0.4375),
        ("token-sum", 7.0),
    ],
)
@pytest.mark.parametrize("padding", [0, 5])
def test_grpo_03_what_each_mode_means(mode, expected, padding):
    # Response A is 1 token of loss 4, response B 3 tokens of loss 1, then masked tokens.
    batch = packed([[0, 1] + [0] * padding, [0, 1, 1, 1] + [0] * padding])
    losses = [9, 4.0] + [9] * padding + [9, 1.0, 1.0, 1.0] + [9] * padding
    assert aggregate(batch, losses, mode) == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("empty", [(), (0,), (2, 5), range(6)])
def test_every_mode_against_plain_python(mode, empty):
    masks = random_masks(seed=3, num_sequences=6, empty=empty)
    generator = torch.Generator().manual_seed(4)
    losses = [torch.randn(len(m), generator=generator).tolist() for m in masks]
    flat = [x for row in losses for x in row]
    expected = oracle(masks, losses, mode, max_response_tokens=11)
    assert aggregate(packed(masks), flat, mode, 11) == pytest.approx(expected, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_grpo_08_nothing_valid_weighs_nothing(mode):
    batch = packed([[0, 0], [0, 0, 0]])
    weights = aggregation_weights(batch.cu_seqlens, batch.response_mask, mode, 8)
    assert weights.tolist() == [0.0] * 5


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_no_sequences_at_all(mode):
    batch = packed([])
    weights = aggregation_weights(batch.cu_seqlens, batch.response_mask, mode, 8)
    assert weights.shape == (0,)


def test_unknown_mode_is_refused():
    with pytest.raises(ConfigError, match=r"loss_agg_mode: 'mean'.*token-mean"):
        aggregation_weights(torch.tensor([0]), torch.zeros(0, dtype=torch.bool), "mean")


@pytest.mark.parametrize("limit", [None, 0])
def test_dr_grpo_needs_the_configured_limit(limit):
    with pytest.raises(ConfigError, match="max_response_tokens"):
        aggregation_weights(
            torch.tensor([0, 1]), torch.tensor([True]), "seq-mean-token-sum-norm", limit
        )


def test_modes_are_those_of_the_configuration():
    assert get_args(get_type_hints(GRPOLossConfig)["loss_agg_mode"]) == LOSS_AGG_MODES


def test_totals_count_what_is_valid():
    batch = packed([[0, 1, 1], [0, 1], [0, 1], [0, 0]], paired=True)
    counts = totals(batch)
    assert (counts.num_tokens, counts.num_sequences, counts.num_pairs) == (4, 3, 1)
    assert totals(packed([[0, 1, 1], [0, 1]])).num_pairs == 0


def test_a_pair_is_valid_if_both_sides_have_a_token():
    batch = packed([[0, 1], [0, 1], [0, 0], [0, 1], [0, 1], [0, 0], [0, 0], [0]], paired=True)
    assert valid_pairs(batch.cu_seqlens, batch.response_mask).tolist() == [
        True,
        False,
        False,
        False,
    ]
