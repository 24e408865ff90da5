"""Rows on disk and a tokenizer with a chat template."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rl_megatron.config.data import DataSource
from rl_megatron.data.tokenizer import Tokenizer, load_tokenizer
from tests.helpers.tiny_tokenizers import CHATML, CHATML_SPECIALS, save_characters


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., DataSource]:
    """Writes rows to rows.jsonl; the keys are the source's."""

    def _write(*rows: dict, **keys: str) -> DataSource:
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
        return DataSource(path=str(path), **keys)

    return _write


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One token per character, ChatML, no BOS; <|im_end|> is the end token."""
    folder = save_characters(
        tmp_path_factory.mktemp("tokenizer"),
        specials=("<unk>", "<s>", "</s>", *CHATML_SPECIALS),
        eos="<|im_end|>",
        chat_template=CHATML,
    )
    return load_tokenizer(folder)
