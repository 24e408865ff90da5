"""What `linear_logprob.py` measured, as a table of a terminal and of the kernels' README."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Table

COLUMNS = (
    "way", "mode", "time / products", "peak MiB", "log-prob error", "entropy error",
    "tokens x runs",
)  # fmt: skip
MARKDOWN_HEADER = (
    "| way | dtype | forward | two passes | one pass | peak MiB | log-prob error | tokens |"
)


@dataclass(frozen=True)
class Size:
    """What is measured."""

    tokens: int
    hidden: int
    vocab: int
    dtype: str
    threads: int
    repeats: int


@dataclass(frozen=True)
class Row:
    """A line of the table; see `linear_logprob`. `tokens` and `repeats` are those of this row."""

    name: str
    dtype: str
    mode: str
    ratio_to_gemm: float | None = None
    peak_mib: float | None = None
    logprob_error: float | None = None
    entropy_error: float | None = None
    tokens: int | None = None
    repeats: int | None = None
    note: str = ""


def table(size: Size, rows: list[Row]) -> Table:
    """The rows, to be printed."""
    where = (
        torch.cuda.get_device_name() if torch.cuda.is_available() else f"{size.threads} CPU threads"
    )
    what = f"{size.tokens} tokens, hidden size {size.hidden}, vocabulary {size.vocab}"
    shown = Table(title=f"{what}, {size.dtype}, {where}", box=SIMPLE)
    for column in COLUMNS:
        left = column in ("way", "mode")
        shown.add_column(column, justify="left" if left else "right", no_wrap=left)
    for row in rows:
        if row.note:
            shown.add_row(row.name, row.mode, escape(row.note))
            continue
        values = (row.ratio_to_gemm, row.peak_mib, row.logprob_error, row.entropy_error)
        formats = ("{:.2f}", "{:.0f}", "{:.1e}", "{:.1e}")
        cells = (number(v, f) for v, f in zip(values, formats, strict=True))
        shown.add_row(row.name, row.mode, *cells, f"{row.tokens} x {row.repeats}")
    return shown


def markdown(rows: list[Row]) -> str:
    """The rows as the table of rl_megatron/kernels/README.md, all modes of a way in one line."""
    lines = [MARKDOWN_HEADER, "|" + "---|" * (MARKDOWN_HEADER.count("|") - 1)]
    for name, dtype in dict.fromkeys((row.name, row.dtype) for row in rows if not row.note):
        modes = {row.mode: row for row in rows if (row.name, row.dtype) == (name, dtype)}
        found = [modes.get(mode) for mode in ("forward", "two-pass", "one-pass")]
        ratios = [number(row.ratio_to_gemm if row else None, "{:.2f}") for row in found]
        peaks = [number(row.peak_mib if row else None, "{:.0f}") for row in found]
        tokens = dict.fromkeys(str(row.tokens) for row in modes.values())
        error = number(max(row.logprob_error or 0.0 for row in modes.values()), "{:.1e}")
        cells = (name, dtype, *ratios, ", ".join(peaks), error, ", ".join(tokens))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def number(value: float | None, form: str) -> str:
    """A cell: the value, or a dash."""
    return "-" if value is None else form.format(value)
