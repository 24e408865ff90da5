"""The records of training data with responses: one example, one preference pair."""

from __future__ import annotations

from dataclasses import dataclass

from rl_megatron.config.data import Overlong
from rl_megatron.data.chat import RenderedExample
from rl_megatron.data.overlong import Dropped, fit_example
from rl_megatron.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Example:
    """A prompt and the response that is trained.

    Attributes:
        row_id: Index of the row in its data set.
        prompt_ids: Tokens that are only read. Empty where cutting on the left left none of them.
        response_ids: Tokens that are trained, the end token included.
    """

    row_id: int
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]


@dataclass(frozen=True)
class PreferencePair:
    """Two responses to one prompt.

    Attributes:
        row_id: Index of the row in its data set.
        chosen: The better one.
        rejected: The worse one.
        margin: By how much better, where the data say so.
    """

    row_id: int
    chosen: Example
    rejected: Example
    margin: float | None = None


@dataclass(frozen=True)
class JudgedExample(Example):
    """A response with a verdict.

    Attributes:
        desirable: The verdict.
        borrowed_ids: A response to the prompt of another row, for the KL of KTO; empty: none.
    """

    desirable: bool
    borrowed_ids: tuple[int, ...] = ()


def fit_rendered(
    row_id: int,
    rendered: RenderedExample,
    tokenizer: Tokenizer,
    max_length: int,
    overlong: Overlong,
) -> Example | Dropped:
    """The rendered row with at most `max_length` tokens; see `fit_example`."""
    fitted = fit_example(
        rendered.prompt.token_ids, rendered.response_ids, max_length, overlong, tokenizer.bos_id
    )
    return fitted if isinstance(fitted, Dropped) else Example(row_id, *fitted)
