"""The rules hold, the checker sees a breach, and what the READMEs name exists."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.check_house_rules import check_repository, check_text

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", "rl_megatron/README.md", "rl_megatron/DECISIONS.md")
FOLDERS = ("rl_megatron", "recipes", "tools", "tests", "slurm", ".ci")


def test_the_repository_keeps_the_house_rules() -> None:
    assert list(check_repository(ROOT)) == []


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("rl_megatron/data/packing.py", 500),
        ("recipes/grpo/train.py", 150),
        ("README.md", 200),
        ("rl_megatron/README.md", 200),
        ("CONTRIBUTING.md", 100),
    ],
)
def test_a_file_may_have_its_limit_and_not_a_line_more(name: str, limit: int) -> None:
    assert list(check_text(name, "\n" * limit)) == []
    (breach,) = check_text(name, "\n" * (limit + 1))
    assert breach == f"{name}:{limit}: {limit + 1} lines, at most {limit}: split it"


def test_a_function_may_have_80_lines_and_not_81() -> None:
    def function(lines: int) -> str:
        return "class A:\n  @property\n  def f(self):\n" + "    x = 1\n" * (lines - 1)

    assert list(check_text("rl_megatron/a.py", function(80))) == []
    (breach,) = check_text("rl_megatron/a.py", function(81))
    assert breach.startswith("rl_megatron/a.py:3: f has 81 lines")


@pytest.mark.parametrize("folder", ["home", "root", "Users", "work"])
def test_a_path_of_one_machine_is_found(folder: str) -> None:
    (breach,) = check_text("slurm/a.sbatch", f"#\ncd /{folder}/me/project")
    assert breach.startswith("slurm/a.sbatch:2: ")


@pytest.mark.parametrize(
    "line",
    ["$SCRATCH/home/data", "~/home/x", "a/home/b", "https://example.org/home/b", "/workspace/x"],
)
def test_a_path_that_works_elsewhere_is_none(line: str) -> None:
    assert list(check_text("README.md", line)) == []


def test_a_loss_without_a_test_is_found_and_the_exit_code_says_so(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    loss = tmp_path / "rl_megatron/losses/dpo.py"
    loss.parent.mkdir(parents=True)
    loss.write_text("")
    (loss.parent / "__init__.py").write_text("")
    command = [sys.executable, ROOT / "tools/check_house_rules.py", tmp_path]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "rl_megatron/losses/dpo.py:1: has no tests/unit/losses/test_dpo.py" in result.stdout


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
    missing = [link for link in links if not ((ROOT / page).parent / link).exists()]
    # In code spans, a path that starts with one of our folders; <name> and * stand for many.
    spans = re.findall(r"`([^`\s]+)`", text)
    named = [s for s in spans if s.split("/")[0] in FOLDERS and not re.search(r"[<*{]", s)]
    missing += [name for name in named if not (ROOT / name).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES)
def test_make_targets_that_a_page_names_exist(page: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", makefile, re.MULTILINE))
    text = (ROOT / page).read_text(encoding="utf-8")
    named = set(re.findall(r"(?:^|`)make ([a-z][a-z0-9-]*)", text, re.MULTILINE))
    assert named <= targets
