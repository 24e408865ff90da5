"""Reference caches of DPO and KTO: built ahead of a run, checked, looked at, tidied.

    python tools/ref_cache.py build [--recipe kto] CONFIG.yaml [key.path=value ...]
    python tools/ref_cache.py verify FOLDER
    python tools/ref_cache.py inspect FOLDER
    python tools/ref_cache.py gc FOLDER [--delete]

build computes the reference's log-probs of all rows of a run of DPO, or of KTO with --recipe kto,
train and held-out, on the layout of the run: start as many ranks with torchrun as it has. Killed,
it goes on where it was, on any number of ranks; shards that are damaged are set aside and computed
again. The other commands need no model; FOLDER is a cache, or a folder of caches such as
runs/ref_cache. gc lists what does not count (of killed writers, set aside, or never published) and
removes it with --delete; not while something is being built there. Exits with 1 if verify finds
damage, with 2 after a mistake.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rl_megatron import log
from rl_megatron.checkpoint.ref_cache import clean, read_manifest, verify_files
from rl_megatron.checkpoint.ref_cache.manifest import MANIFEST_FILE
from rl_megatron.checkpoint.ref_cache.shard import PATTERN
from rl_megatron.config import DPORun, KTORun, load_run
from rl_megatron.errors import CheckpointError, ConfigError, RLMegatronError
from rl_megatron.parallel.process import stop, world_size_from_environment

RUN_CLASSES: dict[str, type[DPORun] | type[KTORun]] = {"dpo": DPORun, "kto": KTORun}


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if all is well."""
    options = _parser().parse_args(arguments)
    rank = int(os.environ.get("RANK", "0"))
    log.silence_megatron_warnings()
    log.setup_logging(rank)
    try:
        return int(options.command(options))
    except RLMegatronError as error:
        if rank == 0:
            print(f"ref_cache: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    build = commands.add_parser("build", help="compute what the cache of a run lacks")
    build.add_argument("config", type=Path, help="YAML of a run")
    build.add_argument("overrides", nargs="*", metavar="key.path=value")
    build.add_argument("--recipe", choices=RUN_CLASSES, default="dpo", help="whose run it is")
    build.set_defaults(command=_build)
    for name, command, said in (
        ("verify", _verify, "read every byte and compare it with its checksum"),
        ("inspect", _inspect, "what caches hold, and what their numbers follow from"),
        ("gc", _collect, "list what does not count"),
    ):
        parsed = commands.add_parser(name, help=said)
        parsed.add_argument("folder", type=Path, help="a cache, or a folder of caches")
        parsed.set_defaults(command=command)
    parsed.add_argument("--delete", action="store_true", help="remove it")
    return parser


def _build(options: argparse.Namespace) -> int:
    run = load_run(RUN_CLASSES[options.recipe], options.config, options.overrides)
    if not (run.needs_reference and run.reference.precompute_ref_logprobs):
        raise ConfigError(
            f"{options.config} has no use for a reference cache: loss.loss_type is "
            f"{run.loss.loss_type} and reference.precompute_ref_logprobs "
            f"{str(run.reference.precompute_ref_logprobs).lower()}."
        )
    # Importing torch and Megatron takes seconds; mistakes are found before.
    from rl_megatron.runtime.build import start_process
    from rl_megatron.runtime.tasks import build_reference_cache

    process = start_process(run, world_size_from_environment())
    cache = build_reference_cache(run, process)
    if process.is_main:
        print(cache.folder)
    stop()
    return 0


def _verify(options: argparse.Namespace) -> int:
    damaged = 0
    for folder in _caches(options.folder):
        problems = list(verify_files(folder))
        damaged += len(problems)
        print(f"{folder}: {'damaged' if problems else 'whole'}")
        for problem in problems:
            print(f"  {problem}")
    return 1 if damaged else 0


def _inspect(options: argparse.Namespace) -> int:
    for folder in _caches(options.folder):
        manifest = read_manifest(folder)
        table = Table(title=str(folder), show_header=False, title_justify="left")
        if manifest is None:
            table.add_row("state", "not published: a build was killed, or still runs")
        else:
            size = sum(path.stat().st_size for path in folder.iterdir())
            tokens = max(manifest.num_tokens, 1)
            table.add_row("rows", f"{manifest.num_rows:,}")
            table.add_row("response tokens", f"{manifest.num_tokens:,}")
            table.add_row("shards", f"{len(manifest.shards):,}")
            table.add_row("bytes", f"{size:,} ({size / tokens:.2f} per response token)")
            for name, value in {**manifest.about, **manifest.fingerprint.fields}.items():
                table.add_row(name, str(value))
        Console().print(table)
    return 0


def _collect(options: argparse.Namespace) -> int:
    for folder in _caches(options.folder):
        for path in clean(folder, options.delete):
            print(f"{'removed' if options.delete else 'left over'} {path}")
    return 0


def _caches(folder: Path) -> list[Path]:
    """`folder` itself, or the caches in it."""
    candidates = [folder, *sorted(folder.iterdir())] if folder.is_dir() else []
    found = [
        path
        for path in candidates
        if path.is_dir() and ((path / MANIFEST_FILE).exists() or any(path.glob(PATTERN)))
    ]
    if not found:
        raise CheckpointError(f"{folder} is no reference cache and holds none.")
    return found


if __name__ == "__main__":
    sys.exit(main())
