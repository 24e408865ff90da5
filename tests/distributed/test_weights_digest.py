"""One digest for a checkpoint, whichever layout holds it, and another once a weight is wrong."""

import pytest
import torch

from tests.helpers.tiny_model import make_tiny_hf

VOCAB, DIVISOR = 131, 64
LAYOUTS = {
    "tp2+sp": {"tensor": 2, "sequence_parallel": True},
    "tp2pp2": {"tensor": 2, "pipeline": 2},
    "pp2vpp2": {"pipeline": 2, "virtual": 2},
    "dp2cp2": {"data": 2, "context": 2},
    "pp2-uneven": {"pipeline": 2, "first_stage_layers": 3, "last_stage_layers": 1},
}
EXPERT_LAYOUTS = {
    "dp2": {"data": 2},
    "ep2": {"data": 2, "expert": 2},
    "ep2 of dp4": {"data": 4, "expert": 2},
    "ep2tp2": {"tensor": 2, "data": 2, "expert": 2, "sequence_parallel": True},
    "ep2pp2": {"pipeline": 2, "data": 2, "expert": 2},
}
FAMILIES = {
    "qwen2-tied": (("qwen2", True), LAYOUTS),
    "qwen3": (("qwen3", False), LAYOUTS),
    "qwen3_moe": (("qwen3_moe", False), EXPERT_LAYOUTS),
}
CASES = [(family, layout) for family, (_, layouts) in FAMILIES.items() for layout in layouts]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {
        name: make_tiny_hf(tmp_path_factory.mktemp(name), family, VOCAB, layers=4, tie=tied)
        for name, ((family, tied), _) in FAMILIES.items()
    }


def digest_job(layout, hf, dtype, spoil=None):
    """The digest of this rank's job; (stage, tensor rank) `spoil` changes one of its weights."""
    from rl_megatron.checkpoint.digest import model_digest
    from rl_megatron.checkpoint.hf_load import load_hf_weights
    from rl_megatron.models.families import read_shape, weight_rules
    from rl_megatron.models.gpt import build_model
    from rl_megatron.parallel.layout import Layout
    from rl_megatron.parallel.process import start_megatron

    process = start_megatron(Layout(**layout), seed=0)
    shape = read_shape(hf)
    chunks, rules = build_model(shape, process, dtype, DIVISOR), weight_rules(shape, DIVISOR)
    load_hf_weights(chunks, rules, hf, process)
    if spoil == (process.stage, process.tensor_rank):
        layer = chunks[-1].decoder.layers[-1]
        layer.mlp.linear_fc2.weight.data[0, 0] += 1
    return model_digest(chunks, rules, process)


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_every_layout_has_the_digest_of_the_files(pool, folders, family, layout):
    from rl_megatron.checkpoint.digest import folder_digest

    settings = FAMILIES[family][1][layout]
    size = 1
    for degree in ("tensor", "pipeline", "data", "context"):
        size *= settings.get(degree, 1)
    found = pool(size).run(digest_job, settings, folders[family], torch.float32)
    assert set(found) == {folder_digest(folders[family])}


def test_a_bfloat16_model_has_the_digest_of_its_rounded_weights(pool, folders, tmp_path):
    from rl_megatron.checkpoint.digest import tensors_digest
    from rl_megatron.checkpoint.hf_files import HFWeights

    with HFWeights(folders["qwen3"]) as files:
        rounded = [(n, files.read(n, (slice(None),)).bfloat16()) for n in files.names]
    found = pool(2).run(digest_job, {"tensor": 2}, folders["qwen3"], torch.bfloat16)
    assert set(found) == {tensors_digest(rounded)}


@pytest.mark.parametrize("spoil", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_one_wrong_weight_on_any_rank_shows(pool, folders, spoil):
    from rl_megatron.checkpoint.digest import folder_digest

    layout = {"tensor": 2, "pipeline": 2}
    found = pool(4).run(digest_job, layout, folders["qwen3"], torch.float32, spoil)
    assert len(set(found)) == 1 and found[0] != folder_digest(folders["qwen3"])
