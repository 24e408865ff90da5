"""Rows from files and folders, and what is said when they are broken."""

import logging
from pathlib import Path

import datasets
import pytest

from rl_megatron.config.data import DataSource
from rl_megatron.data.overlong import Dropped
from rl_megatron.data.sources import Row, convert_rows, read_rows
from rl_megatron.errors import DataError

ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` keeps what it prepared; here beside the test's files."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def fields_of(path: Path, **keys: str) -> list:
    return [row.fields for row in read_rows(DataSource(path=str(path), **keys), "data.train")]


def jsonl(tmp_path: Path, content: str | bytes) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_jsonl_rows_know_their_line_and_their_index(tmp_path: Path) -> None:
    path = jsonl(tmp_path, '{"a": 1}\n\n  \n{"a": "zwei\\u2028drei \u2028 vier"}\r\n{"a": null}')
    rows = read_rows(DataSource(path=str(path)), "data.train")
    assert [(row.index, row.where) for row in rows] == [
        (0, f"{path}:1"),
        (1, f"{path}:4"),
        (2, f"{path}:5"),
    ]
    assert rows[1].fields == {"a": "zwei\u2028drei \u2028 vier"}


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path: Path) -> None:
    assert fields_of(jsonl(tmp_path, b'\xef\xbb\xbf{"a": 1}\n')) == [{"a": 1}]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "x"', r"rows\.jsonl:3: not valid JSON"),
        (b'{"prompt": "\xff"}', r"rows\.jsonl:3: not valid JSON"),
        (b"[1, 2]", r"rows\.jsonl:3: a row must be a JSON object, not list"),
    ],
)
def test_a_broken_line_is_named_with_its_file(tmp_path: Path, line: bytes, message: str) -> None:
    path = jsonl(tmp_path, b'{"prompt": "x"}\n\n' + line + b"\n")
    with pytest.raises(DataError, match=message):
        fields_of(path)


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_a_file_without_rows_is_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(DataError, match=r"data\.train\.path: .*rows\.jsonl has no rows"):
        fields_of(jsonl(tmp_path, content))


def test_a_missing_file_is_named_with_its_setting(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"data\.train\.path: .*none\.jsonl cannot be read: No such"
    ):
        fields_of(tmp_path / "none.jsonl")


def test_a_missing_field_names_what_there_is() -> None:
    row = Row(0, "rows.jsonl:1", {"question": "1+1=", "answer": "2", "prompt": None})
    assert row.require("answer", "data.train.answer_key") == "2"
    with pytest.raises(
        DataError,
        match=r"'prompt' \(data\.train\.prompt_key\); the row has \['answer', 'question'\]",
    ):
        row.require("prompt", "data.train.prompt_key")


@pytest.mark.parametrize("suffix", ["json", "parquet", "csv"])
def test_files_that_datasets_reads(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows.{suffix}"
    getattr(datasets.Dataset.from_list(ROWS), f"to_{suffix}")(path)
    expected = [{**row, "answer": int(row["answer"])} for row in ROWS] if suffix == "csv" else ROWS
    assert fields_of(path) == expected


def test_folders_made_by_save_to_disk(tmp_path: Path) -> None:
    table = datasets.Dataset.from_list(ROWS)
    table.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": table, "test": table.select([1])}).save_to_disk(tmp_path / "two")
    assert fields_of(tmp_path / "one") == ROWS
    assert fields_of(tmp_path / "two") == ROWS
    assert fields_of(tmp_path / "two", split="test") == ROWS[1:]
    with pytest.raises(DataError, match=r"data\.train\.split: .*'dev'.*\['test', 'train'\]"):
        fields_of(tmp_path / "two", split="dev")


def test_folders_of_files(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    datasets.Dataset.from_list(ROWS).to_parquet(folder / "train.parquet")
    datasets.Dataset.from_list(ROWS[:1]).to_parquet(folder / "test.parquet")
    assert fields_of(folder) == ROWS
    assert fields_of(folder, split="test") == ROWS[:1]
    with pytest.raises(DataError, match=r"data\.train\.path: .*'dev'"):
        fields_of(folder, split="dev")


def test_rows_of_datasets_know_their_place(tmp_path: Path) -> None:
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "one")
    rows = read_rows(DataSource(path=str(tmp_path / "one")), "data.train")
    assert [row.where for row in rows] == [
        f"{tmp_path / 'one'} (split train), row {i}" for i in (0, 1)
    ]


def test_gaps_of_columns_are_no_fields_of_a_message(tmp_path: Path) -> None:
    """Arrow gives every message all the fields that any message has."""
    calls = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    messages = [{"role": "user", "content": "q"}, calls]
    datasets.Dataset.from_list([{"prompt": messages}]).save_to_disk(tmp_path / "one")
    assert fields_of(tmp_path / "one") == [{"prompt": messages}]


@pytest.mark.parametrize("name", ["rows.txt", "broken.parquet"])
def test_files_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("no table")
    with pytest.raises(DataError, match=rf"data\.train\.path: .*{name}"):
        fields_of(tmp_path / name)


def test_what_is_neither_here_nor_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match=r"data\.train\.path: 'nobody/nothing' .*is not a file"):
        fields_of(Path("nobody/nothing"))


def rows(count: int) -> list[Row]:
    return [Row(i, f"rows.jsonl:{i + 1}", {"value": i}) for i in range(count)]


def test_dropped_rows_are_counted_by_reason(caplog: pytest.LogCaptureFixture) -> None:
    def convert(row: Row) -> int | Dropped:
        return row.index if row.index % 3 == 0 else Dropped(f"remainder {row.index % 3}")

    with caplog.at_level(logging.INFO):
        assert convert_rows(rows(5), convert, "data.eval") == [0, 3]
    assert [record.getMessage() for record in caplog.records] == [
        "data.eval: dropped 2 of 5 rows: remainder 1",
        "data.eval: dropped 1 of 5 rows: remainder 2",
    ]


def test_nothing_left_is_an_error() -> None:
    with pytest.raises(DataError, match="data.eval: no row of 5 is left: too sad"):
        convert_rows(rows(5), lambda row: Dropped("too sad"), "data.eval")


def test_an_error_names_the_row() -> None:
    def convert(row: Row) -> int:
        if row.index == 1:
            raise DataError("no good")
        return 0

    with pytest.raises(DataError, match=r"^rows\.jsonl:2: no good$"):
        convert_rows(rows(3), convert, "data.train")
