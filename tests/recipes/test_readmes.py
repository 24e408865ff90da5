"""What the READMEs of the recipes say can be run is a run; keys and metrics they name exist."""

import re
import shlex
from pathlib import Path

import pytest

from rl_megatron.config import (
    DPORun,
    GRPORun,
    KTORun,
    RewardModelRun,
    SFTRun,
    load_run,
    parse_command_line,
)
from rl_megatron.config.schema import fields
from rl_megatron.interfaces import metric_names

RECIPES = Path(__file__).parents[2] / "recipes"
RUN_CLASSES = {
    "sft": SFTRun,
    "reward_model": RewardModelRun,
    "dpo": DPORun,
    "kto": KTORun,
    "grpo": GRPORun,
}
READMES = sorted(RECIPES.glob("**/README.md"))

METRICS = {value for name, value in vars(metric_names).items() if name.isupper()}


def name_of(path):
    return str(path.relative_to(RECIPES))


def commands():
    for readme in READMES:
        for block in re.findall(r"```bash\n(.*?)```", readme.read_text("utf-8"), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                yield pytest.param(line, id=f"{name_of(readme)}: {' '.join(line.split())[:60]}")


def keys_of(run_class):
    """Every setting of a run, and every section."""
    keys = {key for key, _ in fields(run_class)}
    return keys | {key.rpartition(".")[0] for key in keys} | set(run_class.model_fields)


def test_each_folder_has_a_readme():
    assert {name_of(path) for path in READMES} == {
        "README.md",
        *(f"{name}/README.md" for name in RUN_CLASSES),
    }


@pytest.mark.parametrize("command", list(commands()))
def test_commands_are_runs(command, capsys, monkeypatch):
    monkeypatch.chdir(RECIPES.parent)
    words = shlex.split(command)
    if words[1].startswith("tools/"):
        assert words[0] == "python" and Path(words[1]).is_file()
        assert all(Path(word).is_file() for word in words if word.endswith(".yaml"))
        return
    at = next(i for i, word in enumerate(words) if word.endswith("train.py"))
    run_class = RUN_CLASSES[Path(words[at]).parent.name]
    assert words[0] in ("python", "torchrun") and Path(words[at]).is_file()
    with pytest.raises(SystemExit) as left:
        parse_command_line(run_class, "", [*words[at + 1 :], "--print-config"])
    assert left.value.code == 0, capsys.readouterr().err
    launched = 1
    for option in ("--nnodes", "--nproc-per-node"):
        if option in words:
            launched *= int(words[words.index(option) + 1])
    settings = [word for word in words[at + 2 :] if "=" in word]
    run = load_run(run_class, words[at + 1], settings)
    if "--print-config" not in words:
        assert launched == (run.cluster.world_size or launched)
        assert launched % run.parallel.model_parallel_size == 0


def quoted_words(text):
    """What stands in backticks in prose, and in the first column of tables.

    The other columns hold other tools' spellings.
    """
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for line in text.splitlines():
        ours = line.split("|")[1] if line.startswith("|") else line
        yield from re.findall(r"`([^`]+)`", ours)


@pytest.mark.parametrize("readme", READMES, ids=name_of)
def test_keys_and_metrics_exist(readme):
    own = RUN_CLASSES.get(readme.parent.name)
    run_classes = [own] if own else list(RUN_CLASSES.values())
    known = set().union(*map(keys_of, run_classes))
    names = set().union(*(run_class.model_fields for run_class in run_classes))
    checked = 0
    for quoted in quoted_words(readme.read_text("utf-8")):
        key = quoted.partition("=")[0]
        if re.fullmatch(r"\w+(\.\w+)+", key) and not key.endswith((".py", ".yaml")):
            if key.partition(".")[0] in names:
                assert key in known, f"there is no setting {key}"
                checked += 1
        elif re.fullmatch(r"[a-z]+(/\w+)+", key) and not key.startswith(
            ("time/", "recipes/", "runs/")
        ):
            assert {key, key.removeprefix("evaluation/")} & METRICS, f"there is no metric {key}"
            checked += 1
    assert checked > 10 or readme.parent == RECIPES
