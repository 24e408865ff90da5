"""Real tokenizers, small enough to build in a test."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
from tokenizers import decoders, models, processors
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_SPECIALS = ("<|im_start|>", "<|im_end|>")


def save_longest_match(
    folder: Path,
    pieces: Sequence[str],
    specials: Sequence[str] = ("<unk>", "<s>", "</s>"),
    bos: str | None = "<s>",
    eos: str | None = "</s>",
    prepends_bos: bool = False,
    chat_template: str | None = None,
    **files: Mapping[str, Any],
) -> Path:
    """A Hugging Face folder whose tokenizer takes the longest piece that fits, left to right.

    Args:
        folder: Made if missing.
        pieces: The vocabulary after the special tokens; ids count on from them.
        specials: The first ids. The first of them stands for what no piece matches.
        bos: Name of the BOS token; None for a tokenizer without one.
        eos: Name of the EOS token.
        prepends_bos: The tokenizer begins every text with BOS when it is called.
        chat_template: Saved with it.
        files: Further JSON files, such as generation_config={"eos_token_id": 3}.
    """
    vocabulary = {piece: index for index, piece in enumerate([*specials, *pieces])}
    model = models.WordPiece(
        vocabulary,
        unk_token=specials[0],
        continuing_subword_prefix="",
        max_input_chars_per_word=100_000,
    )
    backend = tokenizers.Tokenizer(model)
    backend.decoder = decoders.Fuse()
    if prepends_bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, vocabulary[bos])]
        )
    extra = [name for name in specials if name not in (specials[0], bos, eos)]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token=specials[0],
        bos_token=bos,
        eos_token=eos,
        additional_special_tokens=extra,
    )
    tokenizer.chat_template = chat_template
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def save_characters(folder: Path, **options: Any) -> Path:
    """A Hugging Face folder with one token per printable ASCII character; see above."""
    characters = ["\n", *(chr(code) for code in range(32, 127))]
    return save_longest_match(folder, characters, **options)


def save_sentencepiece(folder: Path, **files: Mapping[str, Any]) -> Path:
    """A folder with a SentencePiece tokenizer.model trained on sums (BOS 1, EOS 2).

    As in Llama 2, it puts a space before every text.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lines = (f"user: add {a} and {b} gives {a + b}" for a in range(30) for b in range(30))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines,
        model_prefix=str(folder / "tokenizer"),
        vocab_size=380,
        model_type="bpe",
        byte_fallback=True,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        unk_id=0,
        bos_id=1,
        eos_id=2,
        pad_id=-1,
        minloglevel=2,
    )
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder
