import json
from pathlib import Path

import pytest

from rl_megatron.metrics.jsonl import JsonlFile, read_jsonl


def test_rows_come_back_in_order_with_their_text_readable(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    file = JsonlFile(path)
    file.append(1, {"text": "zwölf\nlines"})
    file.append(2, {"text": None})
    assert list(read_jsonl(path)) == [
        {"step": 1, "text": "zwölf\nlines"},
        {"step": 2, "text": None},
    ]
    assert "zwölf" in path.read_text(encoding="utf-8")
    file.close()


def test_nan_never_reaches_the_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    file = JsonlFile(path)
    with pytest.raises(ValueError, match="not JSON compliant"):
        file.append(1, {"reward": float("nan")})
    file.close()
    assert path.read_text() == ""


def test_a_broken_line_in_the_middle_is_an_error_not_a_gap(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"step": 1}\n{"step": \n{"step": 3}\n')
    with pytest.raises(json.JSONDecodeError):
        list(read_jsonl(path))


def test_resuming_without_a_file_starts_one(tmp_path: Path) -> None:
    JsonlFile(tmp_path / "rows.jsonl", resumed_from=5).close()
    assert (tmp_path / "rows.jsonl").read_text() == ""
