"""A file with one JSON object per line, each of a step."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


class JsonlFile:
    """Lines that are on disk as soon as they are written.

    Args:
        path: The file; its folder must exist.
        resumed_from: The last step that the run had saved before it stopped. Lines of later
            steps, which the run is about to repeat, and a half-written last line are dropped.
            None: the run is new and so is the file.
    """

    def __init__(self, path: Path, resumed_from: int | None = None) -> None:
        kept: list[dict[str, Any]] = []
        if resumed_from is not None and path.exists():
            kept = [row for row in read_jsonl(path) if row["step"] <= resumed_from]
        new = path.with_name(path.name + ".tmp")
        new.write_text("".join(_line(row) for row in kept), encoding="utf-8")
        new.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def append(self, step: int, row: Mapping[str, Any]) -> None:
        """Write one line: the step first, then `row`."""
        self._file.write(_line({"step": step, **row}))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file that `JsonlFile` wrote; a last line cut short by a kill is left out."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("\n"):
                yield json.loads(line)


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n"
