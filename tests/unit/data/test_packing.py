"""Packed ids, masks and log-probs; and the plan of micro-batches."""

import itertools
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rl_megatron.data.examples import Example, PreferencePair
from rl_megatron.data.overlong import fit_example
from rl_megatron.data.packing import (
    MicroBatching,
    pack_preferences,
    pack_rollouts,
    pack_sft,
    plan_micro_batches,
)
from rl_megatron.data.tokenizer import load_tokenizer
from rl_megatron.errors import ConfigError, RolloutError
from rl_megatron.interfaces.records import Prompt, Rollout
from tests.helpers.tiny_tokenizers import save_longest_match


def rollout(
    response: tuple[int, ...], logprobs: tuple[float, ...] | None = None, **fields
) -> Rollout:
    """A rollout of prompt row 4 with the ids 10, 11; log-probs -1, -2, ... if not given."""
    record = Rollout(
        prompt=Prompt(4, (10, 11), "ab"),
        sample_index=0,
        response_ids=response,
        rollout_logprobs=logprobs or tuple(-1.0 - i for i in range(len(response))),
        finish_reason="length",
        text="",
        policy_version=0,
    )
    return replace(record, **fields)


def test_sequences_lie_end_to_end_with_the_response_masked() -> None:
    batch = pack_sft([Example(7, (5, 6), (7,)), Example(3, (8,), (9, 2))])
    assert batch.tokens.tolist() == [5, 6, 7, 8, 9, 2]
    assert batch.cu_seqlens.tolist() == [0, 3, 6]
    assert batch.response_mask.tolist() == [False, False, True, False, True, True]
    assert batch.sequence_ids.tolist() == [0, 1]
    assert not batch.paired and batch.rollout_logprobs is None


def test_pairs_are_interleaved() -> None:
    pairs = [
        PreferencePair(i, Example(i, (1,), (10 + i, 2)), Example(i, (1,), (20 + i, 2)))
        for i in range(2)
    ]
    batch = pack_preferences(pairs)
    assert batch.paired
    assert batch.tokens.tolist() == [1, 10, 2, 1, 20, 2, 1, 11, 2, 1, 21, 2]
    assert batch.sequence_ids.tolist() == [0, 1, 2, 3]


def test_the_same_row_twice_in_a_batch_is_two_sequences() -> None:
    """A batch that straddles the end of an epoch may hold a row twice."""
    batch = pack_sft([Example(7, (5,), (7,))] * 2)
    assert batch.sequence_ids.tolist() == [0, 1]


def test_dpo_07_mask_after_keep_end_truncation() -> None:
    """Row A is all response; its first token has nothing before it, so it has no log-prob."""
    rows = [((1, 2), (3, 4, 5, 6, 7, 8)), ((1,), (9, 10))]
    kept = [fit_example(*row, 4, "truncate_left") for row in rows]
    batch = pack_sft([Example(i, *ids) for i, ids in enumerate(kept)])
    assert batch.tokens.tolist() == [5, 6, 7, 8, 1, 9, 10]
    assert batch.response_mask.int().tolist() == [0, 1, 1, 1, 0, 1, 1]


def test_dpo_12_the_mask_is_on_the_tokens_that_are_scored() -> None:
    """Per-token values belong to the token at their place: the shift is the log-probs' own."""
    logits = torch.tensor([[0.0, 0, 0], [1, 0, 0], [0, 2, 0], [0, 0, 3]])
    batch = pack_sft([Example(0, (2, 0), (1, 2))])
    assert batch.response_mask.tolist() == [False, False, True, True]
    table = logits.log_softmax(-1)
    logprobs = torch.zeros(4)
    logprobs[1:] = table[:-1].gather(1, batch.tokens[1:, None])[:, 0]
    assert logprobs[batch.response_mask].sum().item() == pytest.approx(-3.790989, abs=1e-6)


@pytest.mark.parametrize(
    "response", [(5, 6, 7), (5, 6, 2), (5, 2, 6, 7), (0, 0), (2, 2, 2), (10, 11), ()]
)
def test_ro_01_the_mask_comes_from_lengths(response: tuple[int, ...]) -> None:
    """PAD is 0, EOS is 2: whatever the ids are, the whole response is trained and no more."""
    batch = pack_rollouts([rollout(response), rollout((9,))])
    assert batch.response_mask.tolist() == [False] * 2 + [True] * len(response) + [False] * 2 + [
        True
    ]


def test_ro_04_sampled_ids_are_trained_as_they_are(tmp_path: Path) -> None:
    folder = save_longest_match(
        tmp_path, ["a", "b", "ab", "c", "E"], specials=("<unk>",), bos=None, eos="E"
    )
    tokenizer = load_tokenizer(folder)
    sampled = (1, 2, 4)
    assert tokenizer.encode(tokenizer.decode(sampled)) == [3, 4]  # Text is no way back.
    batch = pack_rollouts([rollout(sampled, (-1.0, -2.0, -3.0))])
    assert batch.tokens.tolist() == [10, 11, 1, 2, 4]
    assert batch.rollout_logprobs.tolist() == [0, 0, -1, -2, -3]


def test_log_probs_lie_beside_their_tokens_in_every_sequence() -> None:
    batch = pack_rollouts([rollout((5, 6)), rollout(()), rollout((7,), (-9.0,))])
    assert batch.tokens.tolist() == [10, 11, 5, 6, 10, 11, 10, 11, 7]
    assert batch.rollout_logprobs.tolist() == [0, 0, -1, -2, 0, 0, 0, 0, -9]
    assert batch.rollout_logprobs.dtype == torch.float32


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (rollout((5, 6), (-1.0, -2.0, -3.0), finish_reason="stop"), "2 response tokens but 3"),
        (rollout((5, 6, 2), (-1.0, -2.0)), "3 response tokens but 2"),
        (
            rollout((5, 6), (-1.0, -2.0), finish_reason="stop"),
            r"no stop token \(\[2, 3\]\) ends it",
        ),
        (rollout((), (), finish_reason="stop"), "no stop token"),
        (rollout((5,), (float("nan"),)), "not finite"),
        (rollout((5,), (float("-inf"),)), "not finite"),
        (rollout((5,), prompt=Prompt(4, (), "")), "its prompt has no token"),
    ],
)
def test_ro_07_a_rollout_that_does_not_hang_together_is_refused(bad: Rollout, message: str) -> None:
    with pytest.raises(RolloutError, match=f"rollout 5 of prompt row 4: .*{message}"):
        pack_rollouts([rollout((5,)), replace(bad, sample_index=5)], stop_token_ids=(3, 2))


def test_ro_07_stop_and_length_are_kept_as_sampled() -> None:
    stopped = rollout((5, 6, 2), finish_reason="stop")
    cut = rollout((5, 6, 7), finish_reason="length")
    batch = pack_rollouts([stopped, cut], stop_token_ids=(2,))
    assert batch.tokens.tolist() == [10, 11, 5, 6, 2, 10, 11, 5, 6, 7]
    assert batch.response_mask.sum() == 6


def test_ro_09_positions_do_not_depend_on_neighbours() -> None:
    alone = pack_rollouts([rollout((7, 8))])
    assert alone.position_ids.tolist() == [0, 1, 2, 3]
    batch = pack_rollouts([rollout((5,) * 9), rollout((7, 8)), rollout(())])
    assert batch.select([1]).position_ids.tolist() == alone.position_ids.tolist()
    assert batch.position_ids.tolist() == [*range(11), *range(4), *range(2)]


# The plan


def flat(plan: list[list[list[int]]]) -> list[int]:
    return [index for rank in plan for micro_batch in rank for index in micro_batch]


def test_every_sequence_is_planned_once_within_the_limits() -> None:
    generator = random.Random(0)
    cases = itertools.product((1, 2, 3), (False, True), (1, 4), (None, 3), range(5))
    for num_ranks, paired, multiple_of, size, _ in cases:
        lengths = [generator.randint(1, 40) for _ in range(2 * generator.randint(1, 15))]
        limit = MicroBatching(size, None if size else 100)
        plan = plan_micro_batches(lengths, paired, num_ranks, limit, multiple_of)
        assert sorted(flat(plan)) == list(range(len(lengths)))
        assert len(plan) == num_ranks and len({len(rank) for rank in plan}) == 1
        assert len(plan[0]) % multiple_of == 0 and len(plan[0]) > 0
        for micro_batch in (m for rank in plan for m in rank):
            if paired:
                assert micro_batch[1::2] == [i + 1 for i in micro_batch[::2]]
                assert all(i % 2 == 0 for i in micro_batch[::2])
            if size:
                assert len(micro_batch) <= size * (2 if paired else 1)
            else:
                assert sum(lengths[i] for i in micro_batch) <= 100
        assert plan == plan_micro_batches(list(lengths), paired, num_ranks, limit, multiple_of)


def test_no_more_micro_batches_than_needed() -> None:
    plan = plan_micro_batches([4] * 8, False, 2, MicroBatching(micro_batch_size=2))
    assert [[len(m) for m in rank] for rank in plan] == [[2, 2], [2, 2]]
    plan = plan_micro_batches(
        [50, 50, 30, 30, 30, 10], False, 1, MicroBatching(max_tokens_per_micro_batch=100)
    )
    assert len(plan[0]) == 2


def test_work_is_even_over_ranks() -> None:
    """One long sequence weighs as much as eight short ones."""
    plan = plan_micro_batches(
        [80] + [10] * 8, False, 2, MicroBatching(max_tokens_per_micro_batch=80)
    )
    assert sorted(len(rank[0]) for rank in plan) == [1, 8]
    generator = random.Random(1)
    lengths = [generator.randint(50, 2000) for _ in range(256)]
    plan = plan_micro_batches(lengths, False, 4, MicroBatching(max_tokens_per_micro_batch=8192))
    tokens = [sum(lengths[i] for m in rank for i in m) for rank in plan]
    assert max(tokens) / min(tokens) < 1.05


def test_extra_micro_batches_are_filled_or_empty() -> None:
    plan = plan_micro_batches([4] * 6, False, 1, MicroBatching(micro_batch_size=6), multiple_of=2)
    assert [len(m) for m in plan[0]] == [3, 3]
    plan = plan_micro_batches([4] * 3, False, 2, MicroBatching(micro_batch_size=1), multiple_of=2)
    assert [[len(m) for m in rank] for rank in plan] in ([[1, 1], [1, 0]], [[1, 0], [1, 1]])


def test_a_tight_fit_is_found_where_even_filling_has_no_room() -> None:
    """50+50 and 40+30+30 fill two micro-batches of 100 to the brim; evenly, 50 goes beside 40."""
    lengths = [50, 50, 40, 30, 30]
    plan = plan_micro_batches(lengths, False, 1, MicroBatching(max_tokens_per_micro_batch=100))
    assert sorted(map(tuple, plan[0])) == [(0, 1), (2, 3, 4)]


@pytest.mark.parametrize(
    ("paired", "message"),
    [(False, "a sequence has 70 tokens; raise it to 70"), (True, "a pair .* 80")],
)
def test_a_sequence_over_the_budget_is_refused(paired: bool, message: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"train\.max_tokens_per_micro_batch is 60, but {message}"
    ):
        plan_micro_batches([10, 70], paired, 1, MicroBatching(max_tokens_per_micro_batch=60))
