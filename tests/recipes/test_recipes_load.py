"""Every YAML under recipes is a run, fits its cluster and its model, and is named truthfully."""

import re
from pathlib import Path

import pytest
import yaml

from rl_megatron.config import (
    DPORun,
    GRPORun,
    KTORun,
    RewardModelRun,
    SFTRun,
    build_run,
    check_model_fits,
    check_world_size,
    dump_run,
    load_run,
)

RECIPES = Path(__file__).parents[2] / "recipes"
RUN_CLASSES = {
    "sft": SFTRun,
    "reward_model": RewardModelRun,
    "dpo": DPORun,
    "kto": KTORun,
    "grpo": GRPORun,
}
FILES = sorted(RECIPES.glob("**/*.yaml"))
VARIANTS = sorted((RECIPES / "grpo/variants").glob("*.yaml"))

# From the config.json of each model.
MODEL_SHAPES = {
    "Qwen3-8B": {
        "num_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 12288,
    },
    "Llama-3.1-70B-Instruct": {
        "num_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 28672,
    },
    "Qwen3-30B-A3B": {
        "num_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "intermediate_size": 768,
        "num_experts": 128,
    },
    "SmolLM2-135M-Instruct": {
        "num_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
    },
}


def load(path: Path):
    return load_run(RUN_CLASSES[path.relative_to(RECIPES).parts[0]], path)


def name_of(path: Path) -> str:
    return str(path.relative_to(RECIPES))


def test_each_algorithm_has_its_recipes():
    names = {name_of(path) for path in FILES}
    assert {f"{algorithm}/smollm2.yaml" for algorithm in RUN_CLASSES} <= names
    assert "grpo/grpo-qwen3-30b-a3b-4n8g-tp4pp2ep4.yaml" in names
    assert {"grpo/grpo-qwen3-8b-2n8g-tp4.yaml", "dpo/dpo-llama-3.1-70b-8n8g-tp8pp4.yaml"} <= names


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_loads_and_survives_printing(path):
    run = load(path)
    assert build_run(type(run), yaml.safe_load(dump_run(run))) == run


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_fits_its_cluster_and_its_model(path):
    run = load(path)
    if run.cluster.world_size is not None:
        check_world_size(run.parallel, run.cluster.world_size, run.cluster)
    shape = MODEL_SHAPES.get(Path(run.model.path).name)
    if shape is not None:  # a model made by a run of ours has no fixed shape
        check_model_fits(run.parallel, **shape)


@pytest.mark.parametrize("path", [p for p in FILES if re.search(r"\d+n\d+g", p.stem)], ids=name_of)
def test_name_says_cluster_and_layout(path):
    megatron = r"tp(\d+)(?:pp(\d+))?(?:ep(\d+))?"
    found = re.fullmatch(rf"(\w+?)-(.+)-(\d+)n(\d+)g-(?:{megatron}|zero(\d))", path.stem)
    names = "<algorithm>-<model>-<N>n<G>g-tp<T>[pp<P>][ep<E>].yaml, or ...g-zero<STAGE>.yaml"
    assert found is not None, f"{path.name}: {names}"
    algorithm, model, nodes, gpus, tensor, pipeline, expert, stage = found.groups()
    run = load(path)
    assert run.backend == ("deepspeed" if stage else "megatron")
    assert not stage or run.deepspeed.zero_stage == int(stage)
    assert algorithm == path.parent.name
    assert run.name == f"{algorithm}-{model}"
    assert (run.cluster.num_nodes, run.cluster.gpus_per_node) == (int(nodes), int(gpus))
    assert run.parallel.tensor_model_parallel_size == int(tensor or 1)
    assert run.parallel.pipeline_model_parallel_size == int(pipeline or 1)
    assert run.parallel.expert_model_parallel_size == int(expert or 1)


@pytest.mark.parametrize(
    "path", [p for p in FILES if "extends:" in p.read_text(encoding="utf-8")], ids=name_of
)
def test_child_holds_only_differences(path):
    child = yaml.safe_load(path.read_text(encoding="utf-8"))
    parent = yaml.safe_load((path.parent / child.pop("extends")).read_text(encoding="utf-8"))

    def repeated(child, parent, key):
        if isinstance(child, dict) and isinstance(parent, dict):
            absent = object()  # a child may set to null what its parent does not mention
            return [
                k for n in child for k in repeated(child[n], parent.get(n, absent), f"{key}.{n}")
            ]
        return [key] if child == parent else []

    assert repeated(child, parent, path.name) == []


def variant_rows():
    """File name to the settings that the table of variants in grpo/README.md gives it."""
    text = (RECIPES / "grpo/README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [^|]*\]\(variants/([\w-]+\.yaml)\) \|.*\| ([^|]*) \|$", text, re.M)
    return {name: re.findall(r"`([^`]+)`", settings) for name, settings in rows}


def test_variants_are_all_in_the_table():
    assert list(variant_rows()) and sorted(variant_rows()) == [path.name for path in VARIANTS]


@pytest.mark.parametrize("path", VARIANTS, ids=name_of)
def test_variant_is_what_the_table_says(path):
    run = yaml.safe_load(dump_run(load(path)))
    assert run["name"] == f"quickstart-{path.stem}"
    for setting in variant_rows()[path.name]:
        key, _, value = setting.partition("=")
        at = run
        for part in key.split("."):
            at = at[part]
        assert at == yaml.safe_load(value or "null"), setting


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_data_beside_the_recipes_is_there(path):
    source = load(path).data.train.path
    if source.startswith("recipes/"):
        assert (RECIPES.parent / source).is_file()
