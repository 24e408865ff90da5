"""Both kinds of tokenizers, through files on disk."""

from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rl_megatron.data.tokenizer import (
    Tokenizer,
    check_same_tokens,
    check_vocabulary,
    load_tokenizer,
)
from rl_megatron.errors import DataError
from tests.helpers.tiny_tokenizers import (
    CHATML,
    CHATML_SPECIALS,
    save_characters,
    save_longest_match,
    save_sentencepiece,
)

USER = [{"role": "user", "content": "add 1"}]


@pytest.fixture(scope="module")
def sentencepiece_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_sentencepiece(tmp_path_factory.mktemp("sentencepiece"))


@pytest.fixture
def llama2(sentencepiece_folder: Path) -> Tokenizer:
    return load_tokenizer(sentencepiece_folder)


def test_encode_adds_no_special_token_and_recognises_written_ones(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save_longest_match(tmp_path, ["a", "b"], prepends_bos=True))
    assert tokenizer.encode("ab") == [3, 4]
    assert tokenizer.encode("<s>ab</s>") == [1, 3, 4, 2]


@pytest.mark.parametrize(
    ("options", "expected"),
    [({"prepends_bos": True}, 1), ({"prepends_bos": False}, None), ({"bos": None}, None)],
)
def test_bos_id_is_what_the_tokenizer_begins_texts_with(
    tmp_path: Path, options: dict, expected: int | None
) -> None:
    folder = save_longest_match(tmp_path, ["a"], **options)
    assert load_tokenizer(folder).bos_id == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (2,)),
        ({"generation_config": {"eos_token_id": 4}}, (2, 4)),
        ({"generation_config": {"eos_token_id": [4, 2, 3]}}, (2, 4, 3)),
        ({"config": {"eos_token_id": 3}}, (2, 3)),
        ({"generation_config": {"eos_token_id": 4}, "config": {"eos_token_id": 3}}, (2, 4)),
    ],
)
def test_stop_ids_are_the_tokenizers_and_the_models(
    tmp_path: Path, files: dict, expected: tuple[int, ...]
) -> None:
    tokenizer = load_tokenizer(save_longest_match(tmp_path, ["a", "b"], **files))
    assert tokenizer.stop_ids == expected
    assert tokenizer.eos_id == 2


def test_a_tokenizer_without_end_token_is_refused(tmp_path: Path) -> None:
    folder = save_longest_match(tmp_path, ["a"], eos=None)
    with pytest.raises(DataError, match="eos_token"):
        load_tokenizer(folder)


def test_vocab_size_is_the_highest_id_plus_one_and_must_fit_the_model(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save_longest_match(tmp_path, ["a", "b"]))
    assert tokenizer.vocab_size == 5
    check_vocabulary(tokenizer, 5)
    with pytest.raises(DataError, match=r"up to 4, .*vocab_size is 4;"):
        check_vocabulary(tokenizer, 4)


def test_truncation_and_padding_saved_in_the_folder_do_not_apply(tmp_path: Path) -> None:
    folder = save_longest_match(tmp_path, ["a"])
    saved = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    saved.enable_truncation(2)
    saved.enable_padding(length=8)
    saved.save(str(folder / "tokenizer.json"))
    assert load_tokenizer(folder).encode("aaaa") == [3, 3, 3, 3]
    assert load_tokenizer(folder).encode("aaaa", continues=True) == [3, 3, 3, 3]


def _save_with_space_prefix(folder: Path, style: str) -> Path:
    """Letters and the space sign; the tokenizer puts one before a text, as Llama 2's does."""
    pieces = ["<unk>", "</s>", "▁", "a", "b", "▁a"]
    backend = tokenizers.Tokenizer(
        models.BPE({p: i for i, p in enumerate(pieces)}, [("▁", "a")], unk_token="<unk>")
    )
    if style == "normalizer":
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        backend.normalizer = normalizers.Sequence(steps)
    elif style == "single":
        backend.normalizer = normalizers.Prepend("▁")
    elif style == "sequence":
        steps = [pre_tokenizers.Metaspace(prepend_scheme="first", split=False)]
        backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=style, split=False)
    backend.decoder = decoders.Metaspace()
    inner = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")
    inner.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("style", ["normalizer", "single", "sequence", "always", "first"])
def test_a_continuation_gets_no_space_before_it(tmp_path: Path, style: str) -> None:
    tokenizer = load_tokenizer(_save_with_space_prefix(tmp_path, style))
    assert tokenizer.encode("ab") == [5, 4]
    assert tokenizer.encode("ab", continues=True) == [3, 4]


def test_sentencepiece_puts_a_space_before_a_text_but_not_before_a_continuation(
    llama2: Tokenizer,
) -> None:
    whole = llama2.encode("add 12")
    assert whole == llama2.encode("add") + llama2.encode(" 12", continues=True)
    assert llama2.encode("12", continues=True) != llama2.encode("12")
    assert llama2.decode(llama2.encode("add ") + llama2.encode("12", continues=True)) == "add 12"


def test_sentencepiece_special_tokens(llama2: Tokenizer) -> None:
    assert (llama2.bos_id, llama2.eos_id, llama2.stop_ids) == (1, 2, (2,))
    assert llama2.vocab_size == 380
    ids = llama2.encode("<s>add</s> 1")
    # The first word gets its space, whatever special token stands before it.
    assert ids == [1, *llama2.encode("add"), 2, *llama2.encode(" 1", continues=True)]
    assert llama2.decode(ids) == "add 1"
    assert llama2.decode(ids, skip_special=False) == "<s>add</s> 1"
    assert llama2.encode("") == []


def test_sentencepiece_text_survives_exactly(llama2: Tokenizer) -> None:
    text = "user:  add 1\n\tund Grüße ✓ "
    assert llama2.decode(llama2.encode(text)) == text


def test_sentencepiece_takes_a_file_as_well(sentencepiece_folder: Path) -> None:
    by_file = load_tokenizer(sentencepiece_folder / "tokenizer.model")
    assert by_file.encode("add 1") == load_tokenizer(sentencepiece_folder).encode("add 1")


def test_sentencepiece_heeds_the_folder_s_config_files(tmp_path: Path) -> None:
    config = {
        "add_bos_token": False,
        "eos_token": {"content": "<|im_end|>"},
        "chat_template": "{{ bos_token }}" + CHATML + "{{ eos_token }}",
        "added_tokens_decoder": {
            "0": {"content": "<unk>", "special": True},
            "380": {"content": "<|im_start|>", "special": True},
            "381": {"content": "<|im_end|>", "special": True},
            "382": {"content": "<think>", "special": False},
        },
    }
    folder = save_sentencepiece(
        tmp_path, tokenizer_config=config, generation_config={"eos_token_id": [2]}
    )
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.bos_id, tokenizer.stop_ids, tokenizer.vocab_size) == (None, (381, 2), 383)
    text = tokenizer.apply_chat_template(USER, add_generation_prompt=True)
    assert text == ("<s><|im_start|>user\nadd 1<|im_end|>\n<|im_start|>assistant\n<|im_end|>")
    ids = tokenizer.encode(text)
    assert ids[:2] == [1, 380] and ids[-1] == 381
    assert tokenizer.decode(tokenizer.encode("<think>1<|im_end|>")) == "<think>1"
    assert tokenizer.decode(tokenizer.encode("<unk>")) == "<unk>"


def test_chat_template_of_the_tokenizer_and_one_that_replaces_it(tmp_path: Path) -> None:
    folder = save_characters(
        tmp_path / "hf", specials=("<unk>", "<s>", "</s>", *CHATML_SPECIALS), chat_template=CHATML
    )
    text = load_tokenizer(folder).apply_chat_template(USER, add_generation_prompt=True)
    assert text == "<|im_start|>user\nadd 1<|im_end|>\n<|im_start|>assistant\n"
    other = tmp_path / "other.jinja"
    other.write_text("{{ bos_token }}{{ messages[0].content }}{% if tools %}+{% endif %}")
    tokenizer = load_tokenizer(folder, other)
    assert tokenizer.apply_chat_template(USER, add_generation_prompt=True) == "<s>add 1"
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert tokenizer.apply_chat_template(USER, True, tools) == "<s>add 1+"


def test_sentencepiece_chat_template_from_its_own_file(tmp_path: Path) -> None:
    folder = save_sentencepiece(tmp_path)
    (folder / "chat_template.jinja").write_text("{{ bos_token }}[{{ messages[0].content }}]")
    assert load_tokenizer(folder).apply_chat_template(USER, True) == "<s>[add 1]"


def test_messages_without_a_template_are_refused(tmp_path: Path, llama2: Tokenizer) -> None:
    for tokenizer in (llama2, load_tokenizer(save_longest_match(tmp_path, ["a"]))):
        with pytest.raises(DataError, match=r"model\.chat_template"):
            tokenizer.apply_chat_template(USER, add_generation_prompt=True)


def test_what_a_template_refuses_is_an_error_with_its_own_words(tmp_path: Path) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    tokenizer = load_tokenizer(save_longest_match(tmp_path, ["a"], chat_template=template))
    with pytest.raises(DataError, match=r"\['user'\]: roles must alternate"):
        tokenizer.apply_chat_template(USER, add_generation_prompt=True)


def _broken_hf(folder: Path) -> Path:
    save_longest_match(folder, ["a"])
    (folder / "tokenizer.json").write_text("{")
    return folder


def _broken_sentencepiece(folder: Path) -> Path:
    (folder / "tokenizer.model").write_bytes(b"not a model")
    return folder


def _broken_generation_config(folder: Path) -> Path:
    save_longest_match(folder, ["a"])
    (folder / "generation_config.json").write_text("{")
    return folder


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "missing", r"model\.tokenizer_path: .*missing is neither"),
        (lambda folder: folder, r"model\.tokenizer_path: no tokenizer can be loaded"),
        (_broken_hf, r"model\.tokenizer_path: no tokenizer can be loaded"),
        (_broken_sentencepiece, "is not a SentencePiece model"),
        (_broken_generation_config, r"generation_config\.json is not valid JSON"),
    ],
)
def test_what_is_missing_or_broken_is_named(tmp_path: Path, make, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_tokenizer(make(tmp_path))


def test_a_missing_template_file_is_named(tmp_path: Path) -> None:
    folder = save_longest_match(tmp_path, ["a"])
    with pytest.raises(DataError, match=r"model\.chat_template: .*none\.jinja cannot be read"):
        load_tokenizer(folder, tmp_path / "none.jinja")


def test_a_model_that_reads_other_text_in_the_same_tokens_is_refused(tmp_path: Path) -> None:
    ours = load_tokenizer(save_longest_match(tmp_path / "ours", ["a", "b"]))
    more = load_tokenizer(save_longest_match(tmp_path / "more", ["a", "b", "c"]))
    check_same_tokens(ours, ours, "rewards.0.path m")
    check_same_tokens(ours, more, "rewards.0.path m")
    with pytest.raises(DataError, match=r"token 5 is 'c' in .*/more and none in .*/ours"):
        check_same_tokens(more, ours, "rewards.0.path m")
    other = load_tokenizer(save_longest_match(tmp_path / "other", ["a", "c"]))
    said = r"^rewards.0.path m has another tokenizer .*: token 4 is 'b' in .*/ours and 'c' in .*/o"
    with pytest.raises(DataError, match=said):
        check_same_tokens(ours, other, "rewards.0.path m")


def test_sentencepiece_tokens_are_listed_with_those_of_the_config(
    llama2: Tokenizer, tmp_path: Path
) -> None:
    listed = llama2.vocabulary()
    assert sorted(listed.values()) == list(range(llama2.vocab_size))
    check_same_tokens(llama2, llama2, "m")
    with pytest.raises(DataError, match="has another tokenizer than the policy"):
        check_same_tokens(llama2, load_tokenizer(save_characters(tmp_path)), "m")
