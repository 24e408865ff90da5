"""Submitting a run: what is checked, what is written, what Slurm is told. Slurm is a stand-in."""

import json
import os
import shlex
import subprocess
import sys
import time

import pytest

from rl_megatron.config import DPORun, GRPORun, dump_run, load_run
from tests.helpers.pool import ROOT

GRPO = "recipes/grpo/grpo-qwen3-8b-2n8g-tp4.yaml"
DPO = "recipes/dpo/dpo-qwen3-8b-2n8g-tp4.yaml"

# Numbers from 101; the queue is a file that a test writes.
SBATCH = """#!/usr/bin/env bash
echo "$@" >>"$STUB/sbatch"
env | grep -E '^(RL|SBATCH)_' | sort >"$STUB/environment"
[ -z "$STUB_REFUSES" ] || { echo "sbatch: error: $STUB_REFUSES" >&2; exit 1; }
echo "$((100 + $(wc -l <"$STUB/sbatch")));here"
"""
SQUEUE = """#!/usr/bin/env bash
for word in "$@"; do
  case "$word" in --jobs=*) grep -s "^${word#--jobs=}[_|]" "$STUB/queue" || true ;; esac
done
"""
SCANCEL = '#!/usr/bin/env bash\necho "$@" >>"$STUB/scancel"\n'
SCONTROL = '#!/usr/bin/env bash\necho "JobId=$5 JobState=FAILED Reason=X ExitCode=75:0"\n'


@pytest.fixture
def desk(tmp_path):
    """`desk(words ...)`: the finished process of tools/submit.py."""
    (tmp_path / "bin").mkdir()
    programs = {"sbatch": SBATCH, "squeue": SQUEUE, "scancel": SCANCEL, "scontrol": SCONTROL}
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "cluster.env").write_text(
        'SBATCH_PARTITION=gpu\nRL_GPUS_PER_NODE=8\nRL_MODULES="cuda gcc"\n'
    )

    def call(*words, **environment):
        values = {
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            "RL_CLUSTER_ENV": str(tmp_path / "cluster.env"),
            "STUB": str(tmp_path),
            "STUB_REFUSES": "",
        }
        command = [sys.executable, str(ROOT / "tools/submit.py"), *map(str, words)]
        return subprocess.run(
            command,
            cwd=ROOT,
            env=values | environment,
            capture_output=True,
            text=True,
            check=False,
        )

    return call


def sent(tmp_path):
    """The words of each call of sbatch."""
    file = tmp_path / "sbatch"
    return [shlex.split(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_run_folder_and_command(desk, tmp_path):
    run = tmp_path / "run"
    done = desk(GRPO, f"output_dir={run}", "optimizer.lr=3e-6", "--", "--time=2:00:00")
    assert done.returncode == 0 and "submitted 101" in done.stdout, done.stderr
    (words,) = sent(tmp_path)
    assert words[-2:] == [str(ROOT / "slurm/grpo.sbatch"), str(run / "config.yaml")]
    assert {"--nodes=2", "--time=2:00:00", f"--output={run}/logs/%j.out"} <= set(words)
    assert json.loads((run / "jobs.json").read_text()) == {"jobs": ["101"]}
    # What was resolved here is what runs, and the site's values are with it.
    resolved = load_run(GRPORun, run / "config.yaml")
    assert resolved.optimizer.lr == 3e-6 and resolved.output_dir == str(run)
    settings = (f"output_dir={run}", "optimizer.lr=3e-6")
    assert dump_run(load_run(GRPORun, ROOT / GRPO, settings)) == dump_run(resolved)
    environment = (tmp_path / "environment").read_text().splitlines()
    assert {"SBATCH_PARTITION=gpu", "RL_MODULES=cuda gcc", f"RL_ROOT={ROOT}"} <= set(environment)
    assert f"RL_STATE_ROOT={run}/logs/slurm" in environment
    assert (run / "logs").is_dir()
    # The file alone submits it again.
    values = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "STUB": str(tmp_path)}
    subprocess.run(["bash", str(run / "submit.sh")], env=values, check=True, capture_output=True)
    assert sent(tmp_path) == [words, words]


def test_sbatch_from_the_command_line_wins_over_the_site(desk, tmp_path):
    assert desk(GRPO, f"output_dir={tmp_path}/run", SBATCH_PARTITION="other").returncode == 0
    assert "SBATCH_PARTITION=other" in (tmp_path / "environment").read_text()


def test_dry_run_writes_nothing(desk, tmp_path):
    done = desk(GRPO, f"output_dir={tmp_path}/run", "--dry-run")
    assert done.returncode == 0
    assert "tensor_model_parallel_size: 4" in done.stdout and "sbatch --parsable" in done.stdout
    assert not (tmp_path / "run").exists() and not sent(tmp_path)


def test_it_is_quick(desk):
    """A login node answers in less than a second: no torch."""
    done = desk(GRPO, "--dry-run")
    assert done.returncode == 0
    times = []
    for _ in range(3):
        begun = time.monotonic()
        desk(GRPO, "--dry-run")
        times.append(time.monotonic() - begun)
    code = "import sys, tools.submit; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
    # Other tests share the cores.
    assert min(times) < 3


def test_dpo_is_two_jobs(desk, tmp_path):
    done = desk(DPO, f"output_dir={tmp_path}/run", "--dependency=afterok:7", "--cache-nodes=1")
    assert "submitted 101 then 102" in done.stdout, done.stderr
    cache, train = sent(tmp_path)
    config = str(tmp_path / "run/config.yaml")
    assert cache[-4:] == [
        *(str(ROOT / "slurm/dpo.sbatch"), "--build-cache"),
        *(config, "cluster.num_nodes=1"),
    ]
    assert train[-2:] == [str(ROOT / "slurm/dpo.sbatch"), config]
    assert "--dependency=afterok:7" in cache and "--nodes=1" in cache
    assert "--dependency=afterok:7,afterok:101" in train and "--nodes=2" in train
    assert "--kill-on-invalid-dep=yes" in cache and "--kill-on-invalid-dep=yes" in train
    load_run(DPORun, config, ["cluster.num_nodes=1"])


@pytest.mark.parametrize(
    "words",
    [("--one-job",), ("reference.precompute_ref_logprobs=false",), ("loss.loss_type=simpo",)],
)
def test_dpo_in_one_job(desk, tmp_path, words):
    if "simpo" in words[0]:
        words = (*words, "reference=", "drift=")
    done = desk(DPO, f"output_dir={tmp_path}/run", *words)
    assert done.returncode == 0, done.stderr
    assert len(sent(tmp_path)) == 1


def test_seeds_are_an_array(desk, tmp_path):
    done = desk(GRPO, f"output_dir={tmp_path}/run", "--seeds=3-5")
    assert done.returncode == 0, done.stderr
    (words,) = sent(tmp_path)
    assert "--array=3-5" in words and words[-1] == f"{tmp_path}/run/seed_%a/config.yaml"
    for seed in (3, 4, 5):
        run = load_run(GRPORun, tmp_path / f"run/seed_{seed}/config.yaml")
        assert run.seed == seed and run.output_dir == f"{tmp_path}/run/seed_{seed}"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((GRPO, "--nodes=3", "parallel.tensor_model_parallel_size=5"), "world size (24)"),
        ((GRPO, "rollout.group_sizes=3"), "rollout.group_sizes"),
        ((GRPO, "cluster.gpus_per_node=4"), "RL_GPUS_PER_NODE = 8"),
        ((GRPO, "--seeds=4-1"), "--seeds 4-1"),
        ((GRPO, "--seeds=1-4", "seed=3"), "seed (command line): is given twice"),
        ((GRPO, "--nodes=2", "cluster.num_nodes=2"), "is given twice"),
        ((), "0 files given"),
    ],
)
def test_mistakes(desk, tmp_path, words, message):
    done = desk(*words)
    assert done.returncode == 2 and message in done.stderr and not sent(tmp_path)


def test_ranks_of_a_node_must_be_known(desk, tmp_path):
    (tmp_path / "cluster.env").write_text("")
    done = desk(GRPO)
    assert done.returncode == 2 and "RL_GPUS_PER_NODE = '': must be" in done.stderr


def test_config_of_one_node_takes_the_sites_gpus(desk, tmp_path):
    done = desk("recipes/grpo/smollm2.yaml", f"output_dir={tmp_path}/run", "--nodes=4")
    assert done.returncode == 0, done.stderr
    cluster = load_run(GRPORun, tmp_path / "run/config.yaml").cluster
    assert (cluster.num_nodes, cluster.gpus_per_node) == (4, 8)


def test_sixty_four_nodes(desk, tmp_path):
    big = "recipes/grpo/grpo-llama-3.1-70b-8n8g-tp8pp4.yaml"
    done = desk(big, f"output_dir={tmp_path}/run", "--nodes=64")
    assert done.returncode == 0, done.stderr
    assert load_run(GRPORun, tmp_path / "run/config.yaml").cluster.world_size == 512
    assert "--nodes=64" in sent(tmp_path)[0]


def test_what_slurm_refuses(desk, tmp_path):
    done = desk(GRPO, f"output_dir={tmp_path}/run", STUB_REFUSES="invalid partition")
    assert done.returncode == 1 and "invalid partition" in done.stderr
    assert json.loads((tmp_path / "run/jobs.json").read_text()) == {"jobs": []}


def test_folder_belongs_to_one_run(desk, tmp_path):
    words = (GRPO, f"output_dir={tmp_path}/run")
    assert desk(*words).returncode == 0
    other = desk(*words, "optimizer.lr=3e-6")
    assert other.returncode == 2 and "another config.yaml" in other.stderr
    (tmp_path / "queue").write_text("101|RUNNING|None|1:00:00|node[1-2]\n")
    again = desk(*words)
    assert again.returncode == 2 and "job 101 of this run is in the queue" in again.stderr
    # Once it has ended, the same command goes on.
    (tmp_path / "queue").unlink()
    assert desk(*words).returncode == 0
    assert json.loads((tmp_path / "run/jobs.json").read_text()) == {"jobs": ["101", "102"]}


def test_status_and_cancel(desk, tmp_path):
    run = tmp_path / "run"
    words = (DPO, f"output_dir={run}")
    assert desk(*words).returncode == 0
    (tmp_path / "queue").write_text("102|PENDING|BeginTime|23:59:59|\n")
    (run / "logs/attempt_1").mkdir()
    (run / "logs/attempt_2").mkdir()
    rows = [{"step": 3, "loss/dpo": 0.7}, {"step": 4, "loss/dpo": 0.65432, "time/x": None}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = desk("--status", run).stdout
    assert "job 101: not in the queue any more: FAILED, exit code 75" in said
    assert "job 102: PENDING (BeginTime), time left 23:59:59, nodes -" in said
    assert f"{run}: attempt 2, step 4: loss/dpo 0.6543\n" in said
    assert desk("--cancel", run).returncode == 0
    assert (tmp_path / "scancel").read_text() == "102\n"
    missing = desk("--status", tmp_path / "nowhere")
    assert missing.returncode == 2 and "no job" in missing.stderr
