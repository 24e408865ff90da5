"""One way from text and messages to ids: boundary, BOS, end token, templates."""

import itertools
import logging
from pathlib import Path

import pytest

from rl_megatron.config.data import DataSource
from rl_megatron.data.chat import parse_conversation, render_prompt, render_response
from rl_megatron.data.preferences import load_preferences
from rl_megatron.data.prompts import load_prompts
from rl_megatron.data.sft import load_sft
from rl_megatron.data.tokenizer import Tokenizer, load_tokenizer
from rl_megatron.errors import DataError
from tests.helpers.tiny_tokenizers import (
    CHATML,
    CHATML_SPECIALS,
    save_characters,
    save_longest_match,
    save_sentencepiece,
)

USER = {"role": "user", "content": "q"}
SYSTEM = {"role": "system", "content": "be brief"}
BOS_CHATML = "{{ bos_token }}" + CHATML


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


@pytest.fixture
def make(tmp_path: Path):
    """Character tokenizers with a chat template; ChatML's end of turn is the end token."""
    numbers = itertools.count()

    def _make(template: str, **options) -> Tokenizer:
        options = {"prepends_bos": True, "eos": "<|im_end|>", **options}
        specials = ("<unk>", "<s>", "</s>", *CHATML_SPECIALS)
        folder = tmp_path / str(next(numbers))
        return load_tokenizer(
            save_characters(folder, specials=specials, chat_template=template, **options)
        )

    return _make


def read(tokenizer: Tokenizer, ids: tuple[int, ...]) -> str:
    return tokenizer.decode(ids, skip_special=False)


# The boundary


def test_dpo_05_prompt_and_response_are_encoded_apart(tmp_path: Path) -> None:
    pieces = ["Q", ":", " ", "$", " $", "4", "6"]
    folder = save_longest_match(tmp_path, [*pieces, "E"], specials=("<unk>",), bos=None, eos="E")
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("Q: $46") == [1, 2, 5, 6, 7]  # Joint encoding merges " $".
    chosen = render_response(tokenizer, "Q: ", "46")
    rejected = render_response(tokenizer, "Q: ", "$46")
    assert chosen.prompt == rejected.prompt == render_prompt(tokenizer, "Q: ")
    assert chosen.prompt.token_ids == (1, 2, 3)
    assert chosen.response_ids == (6, 7, tokenizer.eos_id)
    assert rejected.response_ids == (4, 6, 7, tokenizer.eos_id)
    whole = rejected.prompt.token_ids + rejected.response_ids[:-1]
    assert tokenizer.decode(whole) == "Q: $46"


def test_dpo_05_sentencepiece_response_gets_no_space_of_its_own(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save_sentencepiece(tmp_path))
    rendered = render_response(tokenizer, "add 12 and 3 gives", " 15")
    joined = rendered.prompt.token_ids + rendered.response_ids
    assert tokenizer.decode(joined) == "add 12 and 3 gives 15"
    assert joined == (1, *tokenizer.encode("add 12 and 3 gives 15"), 2)
    without_space = render_response(tokenizer, "12+3=", "15")
    ids = without_space.prompt.token_ids + without_space.response_ids
    assert tokenizer.decode(ids) == "12+3=15"


def test_dpo_05_template_that_opens_a_thinking_block(make) -> None:
    tokenizer = make(CHATML.replace("assistant\n{%", "assistant\n<think>\n{%"))
    rendered = render_response(tokenizer, [USER], [assistant("<think>\nt</think>y")])
    assert rendered.prompt.text.endswith("<|im_start|>assistant\n<think>\n")
    assert rendered.response_text == "t</think>y<|im_end|>\n"
    with pytest.raises(DataError, match="renders the prompt differently"):
        render_response(tokenizer, [USER], [assistant("y")])


# BOS and end token


def _numbers(tmp_path: Path, **options) -> Tokenizer:
    """`a` is 10, ... as in the case: BOS 1, EOS 2, ids 10, 11, 20, 21 are a, b, k, l."""
    pieces = [*(f"#{i}" for i in range(3, 10)), *"abcdefghijkl"]
    return load_tokenizer(save_longest_match(tmp_path, pieces, **options))


@pytest.mark.parametrize(
    ("options", "prompt", "chosen", "expected"),
    [
        ({"prepends_bos": True}, "<s>ab", "kl</s>", [1, 10, 11, 20, 21, 2]),
        ({"prepends_bos": True}, "ab", "kl", [1, 10, 11, 20, 21, 2]),
        ({"prepends_bos": True}, "<s><s>ab", "<s>kl</s></s>", [1, 10, 11, 20, 21, 2]),
        ({"bos": None}, "ab", "kl", [10, 11, 20, 21, 2]),
    ],
)
def test_dpo_06_exactly_one_bos_and_one_eos(
    tmp_path: Path, options: dict, prompt: str, chosen: str, expected: list[int]
) -> None:
    rendered = render_response(_numbers(tmp_path, **options), prompt, chosen)
    assert [*rendered.prompt.token_ids, *rendered.response_ids] == expected
    assert rendered.response_ids == (20, 21, 2)


def test_dpo_06_the_end_token_of_the_template_is_enough(make) -> None:
    """The line break that the template writes after it is never generated, so never trained."""
    tokenizer = make(CHATML)
    rendered = render_response(tokenizer, [USER], [assistant("y")])
    assert read(tokenizer, rendered.response_ids) == "y<|im_end|>"


def test_dpo_06_a_template_without_end_token_gets_the_tokenizers(make) -> None:
    tokenizer = make("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    rendered = render_response(tokenizer, [USER], [assistant("y")])
    assert read(tokenizer, rendered.response_ids) == "assistant: y\n<|im_end|>"


def test_dpo_06_any_stop_token_ends_a_response(make, tmp_path: Path) -> None:
    """A model of which the tokenizer's EOS is not what ends a turn (Llama 3)."""
    tokenizer = make(CHATML, eos="</s>", generation_config={"eos_token_id": [2, 4]})
    rendered = render_response(tokenizer, [USER], [assistant("y")])
    assert read(tokenizer, rendered.response_ids) == "y<|im_end|>"
    plain = render_response(tokenizer, "q", "y")
    assert read(tokenizer, plain.response_ids) == "y</s>"


def test_white_space_at_the_end_of_a_response_is_kept(make) -> None:
    tokenizer = make(CHATML)
    rendered = render_response(tokenizer, "q", "y \n")
    assert read(tokenizer, rendered.response_ids) == "y \n<|im_end|>"


def test_an_empty_response_is_the_end_token(make) -> None:
    tokenizer = make(CHATML)
    end = (tokenizer.eos_id,)
    assert render_response(tokenizer, "q", "").response_ids == end
    assert render_response(tokenizer, [USER], [assistant("")]).response_ids == end


@pytest.mark.parametrize("prepends_bos", [True, False])
@pytest.mark.parametrize("template", [BOS_CHATML, CHATML])
def test_dt_03_the_same_prompt_ids_in_all_paths(
    make, tmp_path: Path, template: str, prepends_bos: bool
) -> None:
    tokenizer = make(template, prepends_bos=prepends_bos)
    row = '{"prompt": [{"role": "user", "content": "q"}], "response": "y", "answer": "y",'
    row += '"chosen": [{"role": "assistant", "content": "y"}], "rejected": "n"}'
    row = row.replace('"rejected": "n"', '"rejected": [{"role": "assistant", "content": "n"}]')
    path = tmp_path / "rows.jsonl"
    path.write_text(row)
    source = DataSource(path=str(path))
    (prompt,) = load_prompts(source, tokenizer, 100, "error")
    (example,) = load_sft(source, tokenizer, 100, "error")
    (pair,) = load_preferences(source, tokenizer, 100, "error")
    ids = prompt.token_ids
    assert ids == example.prompt_ids == pair.chosen.prompt_ids == pair.rejected.prompt_ids
    expected = CHATML_PROMPT
    if prepends_bos or template == BOS_CHATML:
        expected = "<s>" + expected
    assert read(tokenizer, ids) == expected


CHATML_PROMPT = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"


# Templates that rewrite the conversation

DROPS_THINKING = CHATML.replace("m.content }}", "m.content.split('</think>')[-1] }}")
DROPS_EARLIER_THINKING = CHATML.replace(
    "m.content }}", "m.content if loop.last else m.content.split('</think>')[-1] }}"
)
MOVES_THINKING = CHATML.replace(
    "{{ m.content }}",
    "{% if '</think>' in m.content %}<think>\n"
    "{{ m.content.split('</think>')[0].split('<think>')[-1].strip() }}\n</think>\n\n"
    "{{ m.content.split('</think>')[-1].strip() }}{% else %}{{ m.content }}{% endif %}",
)
INJECTS_SYSTEM = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are kind.<|im_end|>\n{% endif %}"
    + CHATML
)
ALWAYS_HEADER = CHATML.replace("{% if add_generation_prompt %}", "{% if true %}")
DROPS_SYSTEM = CHATML.replace(
    "{% for m in messages %}", "{% for m in messages if m.role not in ('system', 'tool') %}"
)
TURN = "<think>t</think>y"


def test_dt_05_dropped_thinking_of_the_trained_turn_is_refused(make) -> None:
    with pytest.raises(DataError, match=r"drops text of the assistant's turn: '<think>t</think>y'"):
        render_response(make(DROPS_THINKING), [USER], [assistant(TURN)])


def test_dt_05_dropped_reasoning_field_is_refused(make) -> None:
    message = {**assistant("y"), "reasoning_content": "because"}
    with pytest.raises(DataError, match="drops text of the assistant's turn: 'because'"):
        render_response(make(CHATML), [USER], [message])


def test_dt_05_thinking_of_the_trained_turn_stays_inside_its_tags(make) -> None:
    for template in (CHATML, DROPS_EARLIER_THINKING):
        tokenizer = make(template)
        rendered = render_response(tokenizer, [USER], [assistant(TURN)])
        assert read(tokenizer, rendered.response_ids) == TURN + "<|im_end|>"
    tokenizer = make(MOVES_THINKING)
    rendered = render_response(tokenizer, [USER], [assistant(TURN)])
    assert read(tokenizer, rendered.response_ids) == "<think>\nt\n</think>\n\ny<|im_end|>"


def test_dt_05_thinking_of_an_earlier_turn_is_the_templates_business(make) -> None:
    """It is not trained, and missing in rollouts too: the prompt is the same in both."""
    tokenizer = make(DROPS_EARLIER_THINKING)
    prompt = [USER, assistant(TURN), USER]
    rendered = render_response(tokenizer, prompt, [assistant("z")])
    assert "<think>" not in rendered.prompt.text
    assert rendered.prompt == render_prompt(tokenizer, prompt)


def test_dt_05_injected_system_prompt_is_in_all_paths_and_logged_once(
    make, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = make(INJECTS_SYSTEM)
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            trained = render_response(tokenizer, [USER], [assistant("y")])
            assert trained.prompt == render_prompt(tokenizer, [USER])
    assert "You are kind." in trained.prompt.text
    assert len([r for r in caplog.records if "You are kind." in r.getMessage()]) == 1


@pytest.mark.parametrize("template", [CHATML, BOS_CHATML])
def test_dt_05_nothing_is_logged_where_nothing_is_injected(
    make, caplog: pytest.LogCaptureFixture, template: str
) -> None:
    with caplog.at_level(logging.INFO):
        render_prompt(make(template), [USER])
        render_prompt(make(INJECTS_SYSTEM), [SYSTEM, USER])
    assert caplog.records == []


@pytest.mark.parametrize("role", ["system", "tool"])
def test_dt_05_a_dropped_role_is_warned_of_once(
    make, caplog: pytest.LogCaptureFixture, role: str
) -> None:
    tokenizer = make(DROPS_SYSTEM)
    for _ in range(2):
        render_prompt(tokenizer, [SYSTEM, {"role": role, "content": "facts"}, USER])
        render_prompt(tokenizer, [USER])
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert sorted(set(warnings)) == sorted(warnings)
    assert len([text for text in warnings if f"role '{role}'" in text]) == 1


def test_dt_05_header_after_the_response_is_refused(make) -> None:
    with pytest.raises(DataError, match="for add_generation_prompt only"):
        render_response(make(ALWAYS_HEADER), [USER], [assistant("y")])


def test_dt_05_prompt_ends_with_the_header_and_the_response_does_not(make) -> None:
    rendered = render_response(make(CHATML), [SYSTEM, USER], [assistant("y")])
    assert rendered.prompt.text.endswith("<|im_start|>assistant\n")
    assert rendered.response_text == "y<|im_end|>\n"


def test_a_template_that_only_separates_turns_is_accepted(make) -> None:
    """DialoGPT's: what follows the question also follows the answer, but it is no header."""
    tokenizer = make("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}")
    rendered = render_response(tokenizer, [USER], [assistant("y")])
    assert read(tokenizer, rendered.prompt.token_ids + rendered.response_ids) == (
        "<s>q<|im_end|>y<|im_end|>"
    )


def test_tools_are_part_of_the_prompt_in_both_paths(make) -> None:
    tokenizer = make("{% for tool in tools %}[{{ tool.name }}]{% endfor %}" + CHATML)
    tools = [{"name": "sum"}]
    prompt = render_prompt(tokenizer, [USER], tools)
    assert prompt.text == "[sum]" + CHATML_PROMPT
    assert render_response(tokenizer, [USER], "y", tools).prompt == prompt


# What a prompt and a response may be


def test_text_beside_messages_counts_as_a_message(make) -> None:
    tokenizer = make(CHATML)
    expected = render_response(tokenizer, [USER], [assistant("y")])
    assert render_response(tokenizer, [USER], "y") == expected
    assert render_response(tokenizer, "q", [assistant("y")]) == expected


@pytest.mark.parametrize("prompt", [[], [USER, assistant("y")]])
def test_a_prompt_must_leave_the_word_to_the_assistant(make, prompt: list) -> None:
    with pytest.raises(DataError, match="a prompt must have a message"):
        render_prompt(make(CHATML), prompt)


@pytest.mark.parametrize("response", [[], [USER], [assistant("y"), USER, assistant("z")]])
def test_a_response_is_one_turn_of_the_assistant(make, response: list) -> None:
    with pytest.raises(DataError, match="must be one assistant message"):
        render_response(make(CHATML), [USER], response)


@pytest.mark.parametrize(
    "value",
    [
        3,
        {"role": "user"},
        ["q"],
        [{"role": "user"}],
        [{"role": "user", "content": [{"text": "q"}]}],
    ],
)
def test_fields_that_are_no_conversation_are_refused(value: object) -> None:
    with pytest.raises(DataError, match="field 'prompt' must"):
        parse_conversation(value, "prompt")


def test_fields_that_are_a_conversation() -> None:
    calls = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    for value in ("", "q", [], [USER], [USER, calls, {"role": "tool", "content": "3"}]):
        assert parse_conversation(value, "prompt") == value
