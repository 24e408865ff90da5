"""Submits a run to Slurm, shows how it is, and cancels it.

    python tools/submit.py CONFIG.yaml [key.path=value ...] [--nodes N] [--dry-run]
    python tools/submit.py --status RUN_FOLDER
    python tools/submit.py --cancel RUN_FOLDER

The run is checked here, against its nodes x GPUs too. Its resolved config.yaml and the commands
that submit it, submit.sh, go into the run folder, and the job runs that file. --dry-run prints both
and writes nothing. The site's values come from slurm/cluster.env (RL_CLUSTER_ENV names another
file; the environment wins over it). DPO or KTO with a reference cache is two jobs, the second after
the first, unless --one-job is given. --seeds 1-4 is an array of runs, each in a folder seed_<n>
below the run folder. What stands behind -- goes to sbatch as it is: -- --time=2:00:00.
Exits with 2 after a mistake, with 1 if Slurm refuses.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rl_megatron.config import (  # noqa: E402
    DPORun,
    GRPORun,
    KTORun,
    ReferencedRun,
    RewardModelRun,
    SFTRun,
    dump_run,
    load_run,
)
from rl_megatron.config.runs import RunBase  # noqa: E402
from rl_megatron.config.yaml_file import read_yaml  # noqa: E402
from rl_megatron.errors import ConfigError  # noqa: E402

RUN_CLASSES: dict[str, type[RunBase]] = {
    "sft": SFTRun,
    "grpo": GRPORun,
    "dpo": DPORun,
    "kto": KTORun,
    "reward_model": RewardModelRun,
}
JOBS_FILE = "jobs.json"
SUBMIT_FILE = "submit.sh"


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if all is well."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    cut = given.index("--") if "--" in given else len(given)
    options = _parser().parse_intermixed_args(given[:cut])
    try:
        if options.status is not None:
            return _status(options.status)
        if options.cancel is not None:
            return _cancel(options.cancel)
        return _submit(options, given[cut + 1 :])
    except ConfigError as error:
        print(f"submit: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", metavar="CONFIG.yaml | key.path=value")
    parser.add_argument("--recipe", choices=RUN_CLASSES, help="default: by the folder of CONFIG")
    parser.add_argument("--nodes", type=int, help="instead of cluster.num_nodes")
    parser.add_argument("--dependency", help="of sbatch, e.g. afterok:1234")
    parser.add_argument("--seeds", metavar="A-B", help="an array of runs that differ in the seed")
    parser.add_argument("--one-job", action="store_true", help="no job for the reference cache")
    parser.add_argument("--cache-nodes", type=int, help="nodes of that job")
    parser.add_argument("--dry-run", action="store_true", help="print what would be done")
    parser.add_argument("--status", type=Path, metavar="RUN_FOLDER")
    parser.add_argument("--cancel", type=Path, metavar="RUN_FOLDER")
    return parser


def _submit(options: argparse.Namespace, sbatch_options: Sequence[str]) -> int:
    config, settings = _split(options.words)
    recipe = options.recipe or _recipe_of(config)
    site = site_values()
    if options.nodes is not None:
        settings.append(f"cluster.num_nodes={options.nodes}")
    run = _load(recipe, config, settings, site)
    folder = Path(run.output_dir)
    runs = {folder: run}
    if options.seeds is not None:
        others = [setting for setting in settings if not setting.startswith("output_dir=")]
        runs = {}
        for seed in _seeds(options.seeds):
            own = [f"seed={seed}", f"output_dir={folder}/seed_{seed}"]
            runs[folder / f"seed_{seed}"] = _load(recipe, config, [*others, *own], site)
    script = _script(recipe, run, folder, list(runs), options, sbatch_options, site)
    if options.dry_run:
        print(f"# {folder}/config.yaml\n{dump_run(next(iter(runs.values())))}")
        print(f"# {folder}/{SUBMIT_FILE}\n{script}", end="")
        return 0
    _refuse_taken(runs)
    for each, its_run in runs.items():
        (each / "logs").mkdir(parents=True, exist_ok=True)
        (each / "config.yaml").write_text(dump_run(its_run), encoding="utf-8")
    (folder / "logs").mkdir(exist_ok=True)
    (folder / SUBMIT_FILE).write_text(script, encoding="utf-8")
    return _run_script(folder, list(runs))


def _split(words: Sequence[str]) -> tuple[Path, list[str]]:
    files = [word for word in words if "=" not in word]
    if len(files) != 1:
        raise ConfigError(f"{len(files)} files given: name one CONFIG.yaml; --help says more")
    return Path(files[0]), [word for word in words if "=" in word]


def _recipe_of(config: Path) -> str:
    """The recipe whose folder a file lies in, or that its sections tell."""
    for name in reversed(config.resolve().parent.parts):
        if name in RUN_CLASSES:
            return name
    if "rewards" in read_yaml(config).data:
        return "grpo"
    raise ConfigError(
        f"{config} does not say what it is for; give --recipe {'|'.join(RUN_CLASSES)}"
    )


def _load(recipe: str, config: Path, settings: list[str], site: Mapping[str, str]) -> RunBase:
    """The run, with the ranks that the site gives it."""
    run_class, gpus = RUN_CLASSES[recipe], site.get("RL_GPUS_PER_NODE", "")
    if not re.fullmatch("[1-9][0-9]*", gpus):
        raise ConfigError(
            f"RL_GPUS_PER_NODE = {gpus!r}: must be the number of GPUs of a node; set it in "
            "slurm/cluster.env"
        )
    try:
        run = load_run(run_class, config, settings)
        known = run.cluster.gpus_per_node is not None
    except ConfigError:
        known = False
    if not known:
        run = load_run(run_class, config, [*settings, f"cluster.gpus_per_node={gpus}"])
    if run.cluster.gpus_per_node != int(gpus):
        raise ConfigError(
            f"cluster.gpus_per_node = {run.cluster.gpus_per_node}: a node of this site has "
            f"RL_GPUS_PER_NODE = {gpus}; change one of them"
        )
    return run


def site_values() -> dict[str, str]:
    """What slurm/cluster.env sets, and the environment over it: names of ours and of sbatch."""
    file = Path(os.environ.get("RL_CLUSTER_ENV", ROOT / "slurm/cluster.env"))
    values: dict[str, str] = {}
    if file.exists():
        shell = 'set -a; . "$1"; exec env -0'
        done = subprocess.run(
            ["bash", "-ec", shell, "bash", str(file)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise ConfigError(f"{file} cannot be read by bash: {done.stderr.strip()}")
        values = dict(line.split("=", 1) for line in done.stdout.split("\0") if "=" in line)
    elif "RL_CLUSTER_ENV" in os.environ:
        raise ConfigError(f"RL_CLUSTER_ENV = {file}: there is no such file")
    values |= os.environ
    return {name: value for name, value in values.items() if name.startswith(("RL_", "SBATCH_"))}


def _seeds(text: str) -> range:
    found = re.fullmatch(r"(\d+)-(\d+)", text)
    if found is None or int(found[1]) > int(found[2]):
        raise ConfigError(f"--seeds {text}: must be two numbers, the smaller first, e.g. 1-4")
    return range(int(found[1]), int(found[2]) + 1)


def _script(
    recipe: str,
    run: RunBase,
    folder: Path,
    folders: Sequence[Path],
    options: argparse.Namespace,
    sbatch_options: Sequence[str],
    site: Mapping[str, str],
) -> str:
    """The text of submit.sh; it prints the number of each job."""
    job = str(ROOT / f"slurm/{recipe}.sbatch")
    is_array = options.seeds is not None
    config = str(folder / ("seed_%a/config.yaml" if is_array else "config.yaml"))
    number = "%A_%a" if is_array else "%j"
    common = ["sbatch", "--parsable", f"--job-name={run.name}"]
    common += [f"--output={folder}/logs/{number}.out", *sbatch_options]
    train = [*common, f"--nodes={run.cluster.num_nodes}"]
    if is_array:
        train.append(f"--array={options.seeds}")
    exports = {"RL_ROOT": str(ROOT), "RL_STATE_ROOT": str(folder.absolute() / "logs/slurm")}
    exports |= {name: value for name, value in site.items() if name not in exports}
    lines = [
        "#!/usr/bin/env bash",
        "# How this run was submitted; run again, it goes on from its last checkpoint.",
        "set -euo pipefail",
        f"cd {shlex.quote(str(Path.cwd()))}",
        *(f"export {name}={shlex.quote(value)}" for name, value in sorted(exports.items())),
    ]
    dependencies = [options.dependency] if options.dependency else []
    if _builds_cache(run) and not options.one_job:
        nodes = options.cache_nodes or run.cluster.num_nodes
        build = [*common, f"--job-name={run.name}-cache", f"--nodes={nodes}"]
        build += [f"--output={folder}/logs/cache-%j.out", *_after(dependencies)]
        build += [job, "--build-cache", str(folders[0] / "config.yaml")]
        build += [f"cluster.num_nodes={nodes}"]
        lines += [f"cache=$({shlex.join(build)})", 'cache="${cache%%;*}"', 'echo "$cache"']
        dependencies.append("afterok:$cache")
    after = " ".join(f'"{option}"' for option in _after(dependencies))
    lines.append(f"{shlex.join(train)} {after} {shlex.join([job, config])}".replace("  ", " "))
    return "\n".join(lines) + "\n"


def _after(dependencies: Sequence[str]) -> list[str]:
    # Else a job whose condition cannot be met any more waits for ever.
    found = ",".join(dependencies)
    return [f"--dependency={found}", "--kill-on-invalid-dep=yes"] if found else []


def _builds_cache(run: RunBase) -> bool:
    return (
        isinstance(run, ReferencedRun)
        and "reference" not in run.idle()
        and run.reference.precompute_ref_logprobs
        and run.reference.build_cache
    )


def _refuse_taken(runs: Mapping[Path, RunBase]) -> None:
    """A run folder belongs to one run, and one job at a time writes to it."""
    for folder, run in runs.items():
        config = folder / "config.yaml"
        if config.exists() and config.read_text(encoding="utf-8") != dump_run(run):
            raise ConfigError(
                f"output_dir = {folder}: holds a run with another config.yaml; name another "
                "output_dir, or remove that file to go on with other settings "
                "(checkpoint.allow_changes)"
            )
        waiting = [job for job in _jobs(folder) if _queued(job)]
        if waiting:
            raise ConfigError(
                f"output_dir = {folder}: job {', '.join(waiting)} of this run is in the queue; "
                f"cancel it first: python tools/submit.py --cancel {folder}"
            )


def _run_script(folder: Path, folders: Sequence[Path]) -> int:
    if shutil.which("sbatch") is None:
        raise ConfigError(
            f"there is no sbatch here: run bash {folder}/{SUBMIT_FILE} on a login node"
        )
    command = ["bash", str(folder / SUBMIT_FILE)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    # In a federation the name of a cluster stands behind the number.
    jobs = [line.partition(";")[0] for line in done.stdout.split()]
    for each in {folder, *folders}:
        text = json.dumps({"jobs": [*_jobs(each), *jobs]})
        (each / JOBS_FILE).write_text(text + "\n", encoding="utf-8")
    if jobs:
        print(f"{folder}: submitted {' then '.join(jobs)}; logs in {folder}/logs")
    return 1 if done.returncode else 0


def _jobs(folder: Path) -> list[str]:
    """The jobs that were submitted for a run, in order."""
    file = folder / JOBS_FILE
    return json.loads(file.read_text(encoding="utf-8"))["jobs"] if file.exists() else []


def _queued(job: str) -> list[dict[str, str]]:
    """Rows of the queue for a job, one per task of an array; none where it has ended."""
    names = ("id", "state", "reason", "left", "nodes")
    command = ["squeue", "--noheader", f"--jobs={job}", "--format=%i|%T|%r|%L|%N"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    rows = done.stdout.split("\n") if done.returncode == 0 else []
    return [dict(zip(names, row.split("|"), strict=True)) for row in rows if row]


def _status(folder: Path) -> int:
    jobs = _jobs(folder)
    if not jobs:
        raise ConfigError(f"{folder}: no job of a run was submitted from here ({JOBS_FILE})")
    for job in jobs:
        rows = _queued(job)
        for row in rows:
            shown = (
                f"{row['state']} ({row['reason']})" if row["state"] == "PENDING" else row["state"]
            )
            print(f"job {row['id']}: {shown}, time left {row['left']}, nodes {row['nodes'] or '-'}")
        if not rows:
            print(f"job {job}: not in the queue any more{_how_it_ended(job)}")
    for each in sorted(folder.glob("seed_*")) or [folder]:
        print(f"{each}: {_progress(each)}")
    return 0


def _how_it_ended(job: str) -> str:
    done = subprocess.run(
        ["scontrol", "-o", "show", "job", job], capture_output=True, text=True, check=False
    )
    found = re.search(r"JobState=(\S+).* ExitCode=(\d+):", done.stdout)
    return f": {found[1]}, exit code {found[2]}" if found else ""


def _progress(folder: Path) -> str:
    """Attempt, last step, and its metrics."""
    attempts = len(list((folder / "logs").glob("attempt_*")))
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else []
    if not lines:
        return f"attempt {attempts}, no step yet" if attempts else "not started"
    row = json.loads(lines[-1])
    step = row.pop("step")
    shown = [f"{name} {value:.4g}" for name, value in row.items() if isinstance(value, int | float)]
    return f"attempt {attempts}, step {step}: {'  '.join(shown)}"


def _cancel(folder: Path) -> int:
    queued = [job for job in _jobs(folder) if _queued(job)]
    if not queued:
        print(f"{folder}: none of its jobs is in the queue")
        return 0
    print(f"{folder}: cancelling {', '.join(queued)}; a run saves before it ends")
    return subprocess.run(["scancel", *queued], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
