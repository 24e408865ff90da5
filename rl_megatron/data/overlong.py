"""What happens to token ids that are too long: pure functions, applied once, to the final ids."""

from __future__ import annotations

from dataclasses import dataclass

from rl_megatron.config.data import Overlong
from rl_megatron.errors import DataError

TokenIds = tuple[int, ...]


@dataclass(frozen=True)
class Dropped:
    """A row that is left out.

    Attributes:
        reason: Equal for all rows that are left out for the same reason, which are counted.
    """

    reason: str


EMPTY_PROMPT = Dropped("empty prompt, and the tokenizer has no BOS token to stand for it")
NOTHING_LEFT = Dropped("nothing of the response is left after cutting (data.max_length)")


def fit_prompt(
    ids: TokenIds, max_length: int, overlong: Overlong, bos_id: int | None = None
) -> TokenIds | Dropped:
    """The prompt with at most `max_length` tokens.

    Args:
        ids: The prompt, special tokens included.
        max_length: `data.max_prompt_length`.
        overlong: `data.overlong`.
        bos_id: A leading token that cutting on the left keeps.

    Raises:
        DataError: It is longer, and `overlong` is "error".
    """
    if not ids:
        return EMPTY_PROMPT
    if len(ids) <= max_length:
        return ids
    too_long = _too_long(f"prompt of {len(ids)} tokens", max_length, overlong, "max_prompt_length")
    return too_long or _cut(ids, max_length, overlong, bos_id)


def fit_example(
    prompt_ids: TokenIds,
    response_ids: TokenIds,
    max_length: int,
    overlong: Overlong,
    bos_id: int | None = None,
) -> tuple[TokenIds, TokenIds] | Dropped:
    """Prompt and response with at most `max_length` tokens together.

    They are cut as one sequence, and the boundary moves along. A first token of a sequence cannot
    be trained on, so a response that is left without any token before it must have two.

    Args:
        prompt_ids: The prompt, special tokens included.
        response_ids: The response, its end token included.
        max_length: `data.max_length`.
        overlong: `data.overlong`.
        bos_id: A leading token that cutting on the left keeps.

    Raises:
        DataError: They are longer, and `overlong` is "error".
    """
    if not prompt_ids:
        return EMPTY_PROMPT
    ids = prompt_ids + response_ids
    if len(ids) <= max_length:
        return prompt_ids, response_ids
    what = f"prompt and response of {len(prompt_ids)} + {len(response_ids)} tokens"
    too_long = _too_long(what, max_length, overlong, "max_length")
    if too_long:
        return too_long
    kept = _cut(ids, max_length, overlong, bos_id)
    if overlong == "truncate_right":
        boundary = min(len(prompt_ids), len(kept))
    else:
        boundary = max(len(kept) - len(response_ids), int(ids[0] == bos_id))
    if len(kept) - max(boundary, 1) < 1:
        return NOTHING_LEFT
    return kept[:boundary], kept[boundary:]


def _too_long(what: str, max_length: int, overlong: Overlong, setting: str) -> Dropped | None:
    """None where it is to be cut."""
    if overlong == "error":
        raise DataError(
            f"{what} (chat template included) is longer than data.{setting} ({max_length}); raise "
            "it, or set data.overlong to drop, truncate_left or truncate_right"
        )
    return Dropped(f"longer than data.{setting} ({max_length})") if overlong == "drop" else None


def _cut(ids: TokenIds, max_length: int, overlong: Overlong, bos_id: int | None) -> TokenIds:
    if overlong == "truncate_right":
        return ids[:max_length]
    head = ids[:1] if ids[0] == bos_id else ()
    # Not ids[-n:], which is everything for n = 0.
    return head + ids[len(ids) - (max_length - len(head)) :]
