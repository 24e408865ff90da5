"""Rows from JSONL files, folders and hub data sets, with their place for messages."""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich.progress import track

from rl_megatron.config.data import DataSource
from rl_megatron.data.overlong import Dropped
from rl_megatron.errors import DataError
from rl_megatron.log import console

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Files that `datasets` reads, by suffix.
_BUILDERS = {".json": "json", ".parquet": "parquet", ".csv": "csv"}


@dataclass(frozen=True)
class Row:
    """One row as it was read.

    Attributes:
        index: Position in the data set, from 0.
        where: The same for people: file and line, or data set and row.
        fields: The row. A field that is None counts as missing: `datasets` fills gaps with None.
    """

    index: int
    where: str
    fields: Mapping[str, Any]

    def get(self, key: str) -> Any | None:
        """The field, or None where the row has none."""
        return self.fields.get(key)

    def require(self, key: str, setting: str) -> Any:
        """The field.

        Args:
            key: Name of the field.
            setting: The configuration key that names it.

        Raises:
            DataError: The row has no such field.
        """
        value = self.fields.get(key)
        if value is None:
            there = sorted(name for name, field in self.fields.items() if field is not None)
            raise DataError(f"no field {key!r} ({setting}); the row has {there}")
        return value


def read_rows(source: DataSource, setting: str) -> list[Row]:
    """All rows of a source, in its own order.

    Args:
        source: Where they are.
        setting: The configuration key of the source, such as `data.train`, for messages.

    Raises:
        DataError: The source is missing, broken (naming file and line) or empty.
    """
    path = Path(source.path)
    if path.suffix == ".jsonl":
        rows = _read_jsonl(path, setting)
    else:
        table = _load_dataset(path, source, setting)
        rows = [
            Row(index, f"{source.path} (split {source.split}), row {index}", _as_fields(fields))
            for index, fields in enumerate(table)
        ]
    if not rows:
        raise DataError(f"{setting}.path: {source.path} has no rows")
    return rows


def convert_rows(
    rows: Sequence[Row], convert: Callable[[Row], T | Dropped], setting: str
) -> list[T]:
    """What `convert` makes of each row, without the rows it drops; the log says how many and why.

    Raises:
        DataError: A row cannot be used (naming its place), or no row is left.
    """
    kept: list[T] = []
    dropped: Counter[str] = Counter()
    hidden = not console().is_terminal or os.environ.get("RANK", "0") != "0"
    for row in track(rows, f"{setting}: tokens", console=console(), transient=True, disable=hidden):
        try:
            result = convert(row)
        except DataError as error:
            raise DataError(f"{row.where}: {error}") from error
        if isinstance(result, Dropped):
            dropped[result.reason] += 1
        else:
            kept.append(result)
    for reason, count in dropped.items():
        logger.info("%s: dropped %d of %d rows: %s", setting, count, len(rows), reason)
    if not kept:
        raise DataError(f"{setting}: no row of {len(rows)} is left: {'; '.join(dropped)}")
    return kept


def _read_jsonl(path: Path, setting: str) -> list[Row]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{setting}.path: {path} cannot be read: {error.strerror}") from error
    rows: list[Row] = []
    # Only \n ends a line: str.splitlines would also split at characters that JSON text may hold.
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            fields = json.loads(line)
        except ValueError as error:
            raise DataError(f"{where}: not valid JSON: {error}; mend or remove the line") from error
        if not isinstance(fields, dict):
            raise DataError(f"{where}: a row must be a JSON object, not {type(fields).__name__}")
        rows.append(Row(len(rows), where, fields))
    return rows


def _load_dataset(path: Path, source: DataSource, setting: str) -> Any:
    # Costs a second to import, and runs on JSONL files need none of it.
    import datasets
    from datasets.exceptions import DatasetsError

    if path.is_file() and path.suffix not in _BUILDERS:
        known = ", ".join([".jsonl", *_BUILDERS])
        raise DataError(f"{setting}.path: {path} is no kind of file that is read here ({known})")
    try:
        if path.is_file():
            return datasets.load_dataset(
                _BUILDERS[path.suffix], data_files=str(path), split=source.split
            )
        saved = ("dataset_info.json", "dataset_dict.json")
        if not any((path / name).is_file() for name in saved):
            return datasets.load_dataset(source.path, split=source.split)
        table = datasets.load_from_disk(source.path)
        if not isinstance(table, datasets.DatasetDict):
            return table
        if source.split not in table:
            raise DataError(
                f"{setting}.split: {source.path} has no split {source.split!r}; "
                f"there are {sorted(table)}"
            )
        return table[source.split]
    except (OSError, ValueError, DatasetsError) as error:
        raise DataError(
            f"{setting}.path: {source.path!r} (split {source.split!r}) is not a file, and cannot "
            f"be loaded as a data set: {error}"
            if not path.exists()
            else f"{setting}.path: {source.path} (split {source.split!r}) cannot be loaded: {error}"
        ) from error


def _as_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The row without the gaps that Arrow's fixed columns put into lists of messages."""
    return {name: _without_gaps(value) for name, value in fields.items()}


def _without_gaps(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_gaps(v) for k, v in value.items() if v is not None or k == "content"}
    if isinstance(value, list):
        return [_without_gaps(item) for item in value]
    return value
