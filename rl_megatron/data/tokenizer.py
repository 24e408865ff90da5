"""One small interface over the tokenizers of Hugging Face and of SentencePiece.

What matters to training is stated here once, so that prompts of rollouts, of training, of the
reference and of evaluation cannot differ:

- `encode` never adds special tokens, but knows those written in the text by a chat template;
- a response is encoded as the continuation of a text: tokenizers that put a space before every
  text they are given (Llama 2, Mistral, most SentencePiece models) do not put one there;
- `bos_id` is only set where the tokenizer itself begins every text with it.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
from jinja2 import TemplateError
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from rl_megatron.errors import DataError

# As a protobuf message: normalizer_spec {add_dummy_prefix: false, remove_extra_whitespaces: false}.
# Appending it to a SentencePiece model overrides just these two fields, because parsing
# concatenated messages merges them; so the protobuf package is not needed.
_NO_DUMMY_PREFIX = b"\x1a\x04\x18\x00\x20\x00"


class Tokenizer(ABC):
    """A tokenizer as this package uses it.

    Attributes:
        path: Where it was read from, for messages.
        bos_id: Token that begins every text; None where the tokenizer begins a text with nothing.
        eos_id: Token that ends a response where a chat template has not ended it already.
        stop_ids: All tokens that end a response in generation, `eos_id` first.
        vocab_size: Highest token id + 1.
    """

    def __init__(
        self, path: Path, bos_id: int | None, stop_ids: tuple[int, ...], vocab_size: int
    ) -> None:
        if not stop_ids:
            raise DataError(
                f"the tokenizer of {path} has no end-of-sequence token, so no response could ever "
                "end; set eos_token in its tokenizer_config.json"
            )
        self.path = path
        self.bos_id = bos_id
        self.eos_id = stop_ids[0]
        self.stop_ids = stop_ids
        self.vocab_size = vocab_size

    @abstractmethod
    def encode(self, text: str, continues: bool = False) -> list[int]:
        """Token ids of `text`; no special token is added, those written in it are recognised.

        Args:
            text: What to encode.
            continues: The text goes on from other text, so nothing may be put before it.
        """

    @abstractmethod
    def vocabulary(self) -> dict[str, int]:
        """The id of every token, special ones included, by how the tokenizer writes it."""

    @abstractmethod
    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of token ids, by default without special tokens."""

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The conversation as text.

        Raises:
            DataError: There is no template, or it refuses the conversation.
        """
        try:
            copies = [dict(message) for message in messages]
            return self._render(copies, add_generation_prompt, [*tools] if tools else None)
        except (TemplateError, TypeError) as error:
            roles = [message.get("role") for message in messages]
            raise DataError(
                f"the chat template of {self.path} refuses a conversation with the roles {roles}: "
                f"{error}; change the row, or set model.chat_template to another template"
            ) from error

    @abstractmethod
    def _render(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool,
        tools: list[Any] | None,
    ) -> str:
        """What the template makes of the conversation; its own errors are let through."""

    def _no_template(self) -> DataError:
        return DataError(
            f"the rows hold chat messages, but the tokenizer of {self.path} has no chat template; "
            "set model.chat_template to the path of a jinja file, or give the prompts as text"
        )


class HuggingFaceTokenizer(Tokenizer):
    """A folder with tokenizer.json, through transformers."""

    def __init__(self, folder: Path, chat_template: str | None) -> None:
        try:
            inner = AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError) as error:
            raise DataError(
                f"model.tokenizer_path: no tokenizer can be loaded from {folder}: {error}"
            ) from error
        if not getattr(inner, "is_fast", False):
            raise DataError(
                f"model.tokenizer_path: the tokenizer of {folder} is a {type(inner).__name__}, "
                "which has no tokenizer.json; convert it to a fast tokenizer first"
            )
        self._inner = inner
        self._chat_template = chat_template
        self._starting = inner.backend_tokenizer
        self._starting.no_truncation()
        self._starting.no_padding()
        self._continuing = _without_prefix(self._starting)
        bos_id = inner.bos_token_id
        begins_with_bos = inner("x").input_ids[:1] == [bos_id] != self.encode("x")[:1]
        super().__init__(
            folder,
            bos_id=bos_id if begins_with_bos else None,
            stop_ids=_stop_ids(folder, inner.eos_token_id),
            vocab_size=max(inner.get_vocab().values()) + 1,
        )

    def encode(self, text: str, continues: bool = False) -> list[int]:
        """See Tokenizer."""
        encoder = self._continuing if continues else self._starting
        return list(encoder.encode(text, add_special_tokens=False).ids)

    def vocabulary(self) -> dict[str, int]:
        """See Tokenizer."""
        return dict(self._inner.get_vocab())

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """See Tokenizer."""
        return str(
            self._inner.decode(
                list(ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
            )
        )

    def _render(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool,
        tools: list[Any] | None,
    ) -> str:
        if self._chat_template is None and not self._inner.chat_template:
            raise self._no_template()
        return str(
            self._inner.apply_chat_template(
                messages,
                tools=tools,
                chat_template=self._chat_template,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
            )
        )


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece .model file, through sentencepiece itself.

    Beside the model file, tokenizer_config.json may add tokens, name the end-of-sequence token,
    turn BOS off and hold a chat template, as in Hugging Face folders.
    """

    def __init__(self, model_file: Path, chat_template: str | None) -> None:
        model = model_file.read_bytes()
        try:
            self._starting = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise DataError(
                f"model.tokenizer_path: {model_file} is not a SentencePiece model: {error}"
            ) from error
        self._continuing = sentencepiece.SentencePieceProcessor(
            model_proto=model + _NO_DUMMY_PREFIX
        )
        folder = model_file.parent
        config = _read_json(folder / "tokenizer_config.json")
        self._specials, self._hidden = self._special_tokens(config)
        self._special_text = {token_id: text for text, token_id in self._specials.items()}
        # Longest first, so that no token hides a longer one that begins with it.
        by_length = sorted(self._specials, key=len, reverse=True)
        self._pattern = re.compile("(" + ("|".join(map(re.escape, by_length)) or "(?!)") + ")")
        bos_id, eos_id = self._starting.bos_id(), self._starting.eos_id()
        self._bos_text = self._special_text.get(bos_id, "")
        named_eos = self._specials.get(_token_text(config.get("eos_token")))
        super().__init__(
            model_file,
            bos_id=bos_id if bos_id >= 0 and config.get("add_bos_token", True) else None,
            stop_ids=_stop_ids(folder, named_eos if named_eos is not None else eos_id),
            vocab_size=max([self._starting.get_piece_size(), *(i + 1 for i in self._special_text)]),
        )
        self._chat_template = chat_template or _template_of(folder, config)

    def _special_tokens(self, config: Mapping[str, Any]) -> tuple[dict[str, int], set[int]]:
        """Tokens that SentencePiece does not find in text by itself; ids that decode to nothing."""
        model = self._starting
        hidden = {i for i in range(model.get_piece_size()) if model.is_control(i)}
        specials = {model.id_to_piece(i): i for i in hidden}
        for name, token in config.get("added_tokens_decoder", {}).items():
            # The unknown token is what no text stands for.
            if int(name) != model.unk_id() and _token_text(token):
                specials[_token_text(token)] = int(name)
                if token.get("special", False):
                    hidden.add(int(name))
        return specials, hidden

    def encode(self, text: str, continues: bool = False) -> list[int]:
        """See Tokenizer."""
        ids: list[int] = []
        # split() keeps the separators: every second part is a special token.
        for index, part in enumerate(self._pattern.split(text)):
            if index % 2:
                ids.append(self._specials[part])
            elif part:
                ids += (self._continuing if continues else self._starting).encode(part)
                continues = True
        return ids

    def vocabulary(self) -> dict[str, int]:
        """See Tokenizer."""
        pieces = {self._starting.id_to_piece(i): i for i in range(self._starting.get_piece_size())}
        return pieces | self._specials

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """See Tokenizer."""
        text = ""
        # Only before the first word is a space the tokenizer's own.
        decoder = self._starting
        for is_special, run in groupby(ids, lambda token_id: token_id in self._special_text):
            if is_special:
                shown = (i for i in run if not (skip_special and i in self._hidden))
                text += "".join(self._special_text[i] for i in shown)
            else:
                text += decoder.decode(list(run))
                decoder = self._continuing
        return text

    def _render(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool,
        tools: list[Any] | None,
    ) -> str:
        if self._chat_template is None:
            raise self._no_template()
        # Conversations and masks, although it is declared to return text.
        rendered: Any = render_jinja_template(
            conversations=[messages],
            tools=tools,
            chat_template=self._chat_template,
            add_generation_prompt=add_generation_prompt,
            bos_token=self._bos_text,
            eos_token=self._special_text.get(self.eos_id, ""),
        )
        return str(rendered[0][0])


def load_tokenizer(path: str | Path, chat_template: str | Path | None = None) -> Tokenizer:
    """The tokenizer of a folder (Hugging Face, or with a tokenizer.model) or of a .model file.

    Args:
        path: Local; nothing is downloaded and no code of the folder is run.
        chat_template: Path of a jinja file that replaces the tokenizer's own template.

    Raises:
        DataError: Something is missing or unreadable.
    """
    path = Path(path)
    template = None
    if chat_template is not None:
        try:
            template = Path(chat_template).read_text(encoding="utf-8")
        except OSError as error:
            raise DataError(
                f"model.chat_template: {chat_template} cannot be read: {error}"
            ) from error
    if path.is_file() and path.suffix == ".model":
        return SentencePieceTokenizer(path, template)
    if not path.is_dir():
        raise DataError(
            f"model.tokenizer_path: {path} is neither a folder nor a SentencePiece .model file"
        )
    if (path / "tokenizer.model").is_file() and not (path / "tokenizer.json").is_file():
        return SentencePieceTokenizer(path / "tokenizer.model", template)
    return HuggingFaceTokenizer(path, template)


def check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Refuse a tokenizer with ids that the model has no embedding for.

    Raises:
        DataError: The tokenizer's vocabulary exceeds the model's.
    """
    if tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"model.tokenizer_path: the tokenizer of {tokenizer.path} has token ids up to "
            f"{tokenizer.vocab_size - 1}, but the model's vocab_size is {vocab_size}; use the "
            "tokenizer that the model was trained with"
        )


def check_same_tokens(tokenizer: Tokenizer, other: Tokenizer, named: str) -> None:
    """Refuse a model that would read other text in the tokens of `tokenizer` than they stand for.

    Args:
        tokenizer: What writes the tokens.
        other: Tokenizer of the model that reads them; it may know more.
        named: The model, for the message.

    Raises:
        DataError: A token is another one there.
    """
    theirs = {number: token for token, number in other.vocabulary().items()}
    for token, number in sorted(tokenizer.vocabulary().items(), key=lambda item: item[1]):
        if theirs.get(number) != token:
            found = repr(theirs[number]) if number in theirs else "none"
            raise DataError(
                f"{named} has another tokenizer than the policy: token {number} is {token!r} in "
                f"{tokenizer.path} and {found} in {other.path}, so it would read other text than "
                "was sampled; take a reward model trained from a model with the policy's tokenizer"
            )


def _without_prefix(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same tokenizer, without the space it puts before a text."""
    spec = json.loads(tokenizer.to_str())
    before = json.dumps([spec["normalizer"], spec["pre_tokenizer"]])
    spec["normalizer"] = _normalizer_without_prefix(spec["normalizer"])
    steps = spec["pre_tokenizer"] or {}
    for step in (steps, *steps.get("pretokenizers", [])):
        if step.get("type") == "Metaspace":
            step["prepend_scheme"] = "never"
        if "add_prefix_space" in step:
            step["add_prefix_space"] = False
    if json.dumps([spec["normalizer"], spec["pre_tokenizer"]]) == before:
        return tokenizer
    return tokenizers.Tokenizer.from_str(json.dumps(spec))


def _normalizer_without_prefix(spec: dict[str, Any] | None) -> dict[str, Any] | None:
    if spec is None or spec["type"] == "Prepend":
        return None
    if spec["type"] == "Sequence":
        kept = [step for step in spec["normalizers"] if step["type"] != "Prepend"]
        return {**spec, "normalizers": kept}
    return spec


def _stop_ids(folder: Path, eos_id: int | None) -> tuple[int, ...]:
    """The tokenizer's own end token, then those that `transformers` would stop at."""
    named = _read_json(folder / "generation_config.json").get("eos_token_id")
    if named is None:
        named = _read_json(folder / "config.json").get("eos_token_id")
    candidates = [eos_id, *(named if isinstance(named, list) else [named])]
    return tuple(dict.fromkeys(i for i in candidates if i is not None and i >= 0))


def _template_of(folder: Path, config: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    return config.get("chat_template")


def _token_text(token: Any) -> str:
    """Text of a token that a config file gives as text or as {"content": text}."""
    return token.get("content", "") if isinstance(token, dict) else token or ""


def _read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file, empty if there is no such file."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_bytes())
    except ValueError as error:
        raise DataError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"{file} holds no JSON object")
    return content
