"""Converts a model folder: Hugging Face to Megatron (import) and back (export).

    python tools/convert_checkpoint.py import --hf FOLDER --output FOLDER [setting=value ...]
    python tools/convert_checkpoint.py export --checkpoint FOLDER --output FOLDER [...]

Settings are those of `parallel` in a run, e.g. tensor_model_parallel_size=2; start as many ranks
with torchrun. They only say how the work is shared: a Megatron checkpoint is read under any layout.
The checkpoint carries config and tokenizer files, so that an export does not need the first folder.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from rich.progress import track

from rl_megatron import log
from rl_megatron.checkpoint.folders import HF_SUBFOLDER, resolve_model_folder
from rl_megatron.checkpoint.hf_files import carry_hf_files, lossless_dtype, read_records
from rl_megatron.checkpoint.hf_load import load_hf_weights
from rl_megatron.checkpoint.hf_save import iter_hf_weights, save_hf
from rl_megatron.checkpoint.megatron import load_megatron, save_megatron
from rl_megatron.checkpoint.publish import new_checkpoint, read_pointer
from rl_megatron.config.command_line import parse_parallel
from rl_megatron.config.parallel import ParallelConfig
from rl_megatron.errors import CheckpointError, RLMegatronError
from rl_megatron.models.families import read_shape, weight_rules
from rl_megatron.parallel.process import Process, stop
from rl_megatron.runtime.build import build_bare_model

Item = TypeVar("Item")

# Of no consequence for what is written: vocabulary rows are padded anew by whoever reads it.
VOCAB_DIVISOR = 128
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when the folder is written, 2 after a mistake, which is then on stderr."""
    options = _parser().parse_args(arguments)
    is_main = os.environ.get("RANK", "0") == "0"
    log.silence_megatron_warnings()
    log.setup_logging(int(os.environ.get("RANK", "0")))
    try:
        convert = _import if options.direction == "import" else _export
        convert(options, parse_parallel(options.settings))
    except RLMegatronError as error:
        if is_main:
            print(f"convert_checkpoint: {error}", file=sys.stderr)
        return 2
    if is_main:
        print(f"wrote {options.output}")
    stop()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    directions = parser.add_subparsers(dest="direction", required=True)
    into = directions.add_parser("import", help="Hugging Face folder to Megatron checkpoint")
    into.add_argument("--hf", type=Path, required=True, help="folder with config.json")
    out = directions.add_parser("export", help="Megatron checkpoint to Hugging Face folder")
    out.add_argument(
        "--checkpoint", type=Path, required=True, help="checkpoint folder, or one iter_ folder"
    )
    out.add_argument(
        "--dtype", choices=DTYPES, help="of all tensors (default: what each was when imported)"
    )
    for direction in (into, out):
        direction.add_argument("--output", type=Path, required=True, help="folder to be made")
        direction.add_argument("settings", nargs="*", metavar="setting=value")
    return parser


def _import(options: argparse.Namespace, parallel: ParallelConfig) -> None:
    source = resolve_model_folder(options.hf, "--hf")
    if source.megatron is not None:
        raise CheckpointError(f"--hf {options.hf} is a Megatron checkpoint already.")
    if read_pointer(options.output) is not None:
        raise CheckpointError(f"--output {options.output} holds a checkpoint; name a new folder.")
    shape = read_shape(source.hf)
    dtype = lossless_dtype(read_records(source.hf).values())
    process, chunks = build_bare_model(shape, parallel, dtype, VOCAB_DIVISOR)
    rules = weight_rules(shape, VOCAB_DIVISOR)
    load_hf_weights(chunks, rules, source.hf, process, _progress("reading", process, len(rules)))
    with new_checkpoint(options.output, 0, process) as folder:
        save_megatron(folder, chunks, process)
        if process.is_main:
            carry_hf_files(source.hf, folder / HF_SUBFOLDER)


def _export(options: argparse.Namespace, parallel: ParallelConfig) -> None:
    source = resolve_model_folder(options.checkpoint, "--checkpoint")
    if source.megatron is None:
        raise CheckpointError(
            f"--checkpoint {options.checkpoint} is a Hugging Face folder already."
        )
    if options.output.exists():
        raise CheckpointError(f"--output {options.output} exists already; name a new folder.")
    shape = read_shape(source.hf)
    dtype = DTYPES.get(options.dtype)
    records = read_records(source.hf)
    dtype_held = dtype or lossless_dtype(records.values())
    process, chunks = build_bare_model(shape, parallel, dtype_held, VOCAB_DIVISOR)
    load_megatron(source.megatron, chunks)
    weights = iter_hf_weights(chunks, weight_rules(shape, VOCAB_DIVISOR), process)
    shown = _progress("writing", process, len(records))(weights)
    save_hf(options.output, iter(shown), source.hf, process, dtype=dtype)


def _progress(title: str, process: Process, total: int):
    """Wraps a loop in a progress bar on the terminal of rank 0."""

    def wrap(items: Iterable[Item]) -> Iterable[Item]:
        shown = process.is_main and log.console().is_terminal
        return track(items, title, total, console=log.console()) if shown else items

    return wrap


if __name__ == "__main__":
    sys.exit(main())
