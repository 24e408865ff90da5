"""Prints the weights digest of models: equal for equal weights, however they are stored.

    python tools/weights_digest.py FOLDER [FOLDER ...] [setting=value ...]

A folder is a Hugging Face model, or a Megatron checkpoint (the latest of a run, or one iter_
folder). A checkpoint may be read by several ranks under torchrun, with settings of `parallel` such
as tensor_model_parallel_size=2. One line per folder: digest, path. Exits with 2 after a mistake.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rl_megatron import log
from rl_megatron.checkpoint.digest import folder_digest, model_digest
from rl_megatron.checkpoint.folders import resolve_model_folder
from rl_megatron.checkpoint.hf_files import lossless_dtype, read_records
from rl_megatron.checkpoint.megatron import load_megatron
from rl_megatron.config.command_line import parse_parallel
from rl_megatron.config.parallel import ParallelConfig
from rl_megatron.errors import RLMegatronError
from rl_megatron.models.families import read_shape, weight_rules
from rl_megatron.parallel.process import stop
from rl_megatron.runtime.build import build_bare_model

VOCAB_DIVISOR = 128


def main(arguments: Sequence[str] | None = None) -> int:
    """0, or 2 after a mistake, which is then on stderr."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="+", metavar="FOLDER | setting=value")
    words = parser.parse_args(arguments).words
    settings = [word for word in words if "=" in word and not Path(word).exists()]
    folders = [Path(word) for word in words if word not in settings]
    if not folders:
        parser.error("name at least one folder")
    is_main = os.environ.get("RANK", "0") == "0"
    log.silence_megatron_warnings()
    try:
        parallel = parse_parallel(settings)
        for folder in folders:
            digest = digest_of(folder, parallel)
            if is_main:
                print(f"{digest}  {folder}", flush=True)
    except RLMegatronError as error:
        if is_main:
            print(f"weights_digest: {error}", file=sys.stderr)
        return 2
    stop()
    return 0


def digest_of(folder: Path, parallel: ParallelConfig) -> str:
    """The digest of a folder; several ranks share the work of a Megatron checkpoint."""
    found = resolve_model_folder(folder, "FOLDER")
    if found.megatron is None:
        return folder_digest(found.hf)
    shape = read_shape(found.hf)
    dtype = lossless_dtype(read_records(found.hf).values())
    process, chunks = build_bare_model(shape, parallel, dtype, VOCAB_DIVISOR)
    load_megatron(found.megatron, chunks)
    return model_digest(chunks, weight_rules(shape, VOCAB_DIVISOR), process)


if __name__ == "__main__":
    sys.exit(main())
