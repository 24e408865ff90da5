"""Cutting, dropping and refusing, on ids alone."""

import itertools

import pytest

from rl_megatron.data.overlong import EMPTY_PROMPT, NOTHING_LEFT, Dropped, fit_example, fit_prompt
from rl_megatron.errors import DataError

SIX = (1, 2, 3, 4, 5, 6)
MODES = ("error", "drop", "truncate_left", "truncate_right")


def test_dt_04_over_long_prompt_in_every_mode() -> None:
    with pytest.raises(DataError, match=r"6 tokens .*data\.max_prompt_length \(4\)"):
        fit_prompt(SIX, 4, "error")
    assert fit_prompt(SIX, 4, "drop") == Dropped("longer than data.max_prompt_length (4)")
    assert fit_prompt(SIX, 4, "truncate_left") == (3, 4, 5, 6)
    assert fit_prompt(SIX, 4, "truncate_right") == (1, 2, 3, 4)


def test_cutting_on_the_left_keeps_the_bos() -> None:
    assert fit_prompt(SIX, 4, "truncate_left", bos_id=1) == (1, 4, 5, 6)
    assert fit_prompt(SIX, 1, "truncate_left", bos_id=1) == (1,)
    assert fit_prompt(SIX, 4, "truncate_left", bos_id=9) == (3, 4, 5, 6)


@pytest.mark.parametrize("mode", MODES)
def test_dt_04_empty_prompt_and_lone_end_token(mode) -> None:
    assert fit_prompt((), 4, mode) == EMPTY_PROMPT
    assert fit_prompt((1,), 4, mode) == (1,)
    assert fit_example((), (5, 2), 4, mode) == EMPTY_PROMPT
    assert fit_example((1,), (2,), 4, mode) == ((1,), (2,))


def test_dpo_07_keep_end() -> None:
    assert fit_example((1, 2), (3, 4, 5, 6, 7, 8), 4, "truncate_left") == ((), (5, 6, 7, 8))
    assert fit_example((1,), (9, 10), 4, "truncate_left") == ((1,), (9, 10))


def test_an_example_that_fits_exactly_is_not_touched() -> None:
    for mode in MODES:
        assert fit_example((1, 2), (3, 4), 4, mode) == ((1, 2), (3, 4))


def test_an_over_long_example_is_refused_or_dropped_with_its_setting() -> None:
    with pytest.raises(DataError, match=r"2 \+ 3 tokens .*data\.max_length \(4\).*data\.overlong"):
        fit_example((1, 2), (3, 4, 5), 4, "error")
    assert fit_example((1, 2), (3, 4, 5), 4, "drop") == Dropped("longer than data.max_length (4)")


@pytest.mark.parametrize(
    ("prompt", "response", "mode", "bos_id", "expected"),
    [
        ((1, 2, 3), (4, 5, 6), "truncate_left", None, ((3,), (4, 5, 6))),
        ((1, 2, 3), (4, 5, 6), "truncate_left", 1, ((1,), (4, 5, 6))),
        ((1, 2), (4, 5, 6, 7), "truncate_left", 1, ((1,), (5, 6, 7))),
        ((1, 2, 3), (4, 5, 6), "truncate_right", None, ((1, 2, 3), (4,))),
        # The boundary is where the prompt ends, so nothing is left to train on.
        ((1, 2, 3, 4), (5, 6), "truncate_right", None, NOTHING_LEFT),
        ((1, 2, 3, 4, 5), (6,), "truncate_right", None, NOTHING_LEFT),
    ],
)
def test_the_boundary_moves_along(prompt, response, mode, bos_id, expected) -> None:
    assert fit_example(prompt, response, 4, mode, bos_id) == expected


def test_a_response_whose_only_token_is_a_first_one_has_nothing_to_train() -> None:
    assert fit_example((1, 2), (3, 4), 1, "truncate_left") == NOTHING_LEFT
    assert fit_example((1, 2), (3, 4), 1, "truncate_left", bos_id=1) == NOTHING_LEFT
    assert fit_example((1, 2), (3, 4), 2, "truncate_left", bos_id=1) == ((1,), (4,))


def test_what_is_kept_is_a_piece_of_the_whole_with_something_to_train() -> None:
    """All small cases against a statement of what cutting means."""
    sizes = itertools.product(range(1, 4), range(1, 5), range(1, 7), (None, 1))
    for num_prompt, num_response, limit, bos_id in sizes:
        prompt = tuple(range(1, 1 + num_prompt))
        response = tuple(range(11, 11 + num_response))
        whole = prompt + response
        for mode in ("truncate_left", "truncate_right"):
            fitted = fit_example(prompt, response, limit, mode, bos_id)
            if isinstance(fitted, Dropped):
                continue
            kept = fitted[0] + fitted[1]
            assert len(kept) == min(limit, len(whole))
            assert all(i < 11 for i in fitted[0]) and all(i >= 11 for i in fitted[1])
            assert fitted[1] and (fitted[0] or len(fitted[1]) > 1)
            if mode == "truncate_right":
                assert kept == whole[: len(kept)]
            elif bos_id is None:
                assert kept == whole[-len(kept) :]
            else:
                assert kept[0] == 1 and kept[1:] == whole[len(whole) - len(kept) + 1 :]
