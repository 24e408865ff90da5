"""What slurm/README.md and cluster.env.example say is so."""

import os
import re
import shlex
import subprocess
import sys

import pytest

from tests.helpers.pool import ROOT

README = (ROOT / "slurm/README.md").read_text(encoding="utf-8")
EXAMPLE = ROOT / "slurm/cluster.env.example"
SHELL = "".join((ROOT / f"slurm/{name}.sh").read_text() for name in ("env", "node"))


def commands():
    for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL):
        for line in block.splitlines():
            if line.startswith(("python", "sbatch")):
                yield shlex.split(line)


@pytest.mark.parametrize("words", list(commands()), ids=lambda words: " ".join(words)[:70])
def test_commands(words):
    files = [word for word in words if word.startswith(("slurm/", "recipes/", "tools/"))]
    assert files and all((ROOT / file).is_file() for file in files)
    if "tools/submit.py" in words and not {"--status", "--cancel"} & set(words):
        words.insert(words.index("tools/submit.py") + 1, "--dry-run")
        environment = {"PATH": os.environ["PATH"], "RL_CLUSTER_ENV": str(EXAMPLE)}
        done = subprocess.run(
            [sys.executable, *words[1:]],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr


def test_example_is_read_and_read_by_something():
    text = EXAMPLE.read_text()
    for name in re.findall(r"^#?(RL_\w+)=", text, re.MULTILINE):
        assert f"${{{name}" in SHELL or f"${name}" in SHELL, f"nothing reads {name}"
    command = 'set -aeu; . "$1"; echo "$SBATCH_PARTITION $RL_GPUS_PER_NODE"'
    done = subprocess.run(
        ["bash", "-c", command, "bash", str(EXAMPLE)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "gpu 8\n"


def test_settings_that_the_readme_names_are_read():
    named = set(re.findall(r"`(RL_\w+)", README))
    unread = {name for name in named if f"{name}" not in SHELL}
    assert named and not unread


def test_every_job_is_in_the_table():
    for job in (ROOT / "slurm").glob("*.sbatch"):
        assert f"`{job.name}`" in README


def test_readme_of_the_project_points_here():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "slurm/README.md" in text and "make test-slurm" in text
