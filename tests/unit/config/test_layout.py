"""Whether ranks and models fit a layout."""

import pytest

from rl_megatron.config import check_model_fits, check_world_size
from rl_megatron.config.parallel import ClusterConfig, ParallelConfig
from rl_megatron.errors import ConfigError

QWEN3_8B = {
    "num_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 12288,
}
LLAMA_3_1_70B = {
    "num_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 28672,
}
SMOLLM2_135M = {
    "num_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
}
# The width is that of one expert.
QWEN3_30B_A3B = {
    "num_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "intermediate_size": 768,
    "num_experts": 128,
}


def parallel(tp=1, pp=1, vpp=None, first=None, last=None, cp=1, ep=1, sp=False):
    return ParallelConfig(
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        sequence_parallel=sp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        **{
            key: value
            for key, value in (
                ("num_layers_in_first_pipeline_stage", first),
                ("num_layers_in_last_pipeline_stage", last),
            )
            if value is not None
        },
    )


def refusal(check, *arguments, **numbers):
    with pytest.raises(ConfigError) as error:
        check(*arguments, **numbers)
    return str(error.value)


def test_what_is_left_of_the_ranks_is_data_parallel():
    assert check_world_size(parallel(tp=2, pp=2), 16) == 4
    assert check_world_size(parallel(), 1) == 1
    assert check_world_size(parallel(tp=8), 16, ClusterConfig(num_nodes=2, gpus_per_node=8)) == 2
    assert check_world_size(parallel(), 3, ClusterConfig()) == 3


def test_ranks_that_do_not_divide():
    assert refusal(check_world_size, parallel(tp=3), 8) == (
        "parallel.tensor_model_parallel_size = 3: tensor (3) x pipeline (1) x context (1) must "
        "divide world size (8); change the degrees or the number of ranks"
    )
    for layout, ranks, named in (
        (parallel(tp=2, pp=2), 2, "pipeline_model_parallel_size = 2"),
        (parallel(cp=3), 4, "context_parallel_size = 3"),
        (parallel(tp=2, pp=2, cp=2), 12, "context_parallel_size = 2"),
        (parallel(tp=3, cp=2), 4, "tensor_model_parallel_size = 3"),
    ):
        found = refusal(check_world_size, layout, ranks)
        assert found.startswith(f"parallel.{named}: ") and f"world size ({ranks})" in found


def test_ranks_that_cannot_share_experts():
    assert check_world_size(parallel(ep=4), 8) == 8
    assert check_world_size(parallel(tp=2, pp=2, ep=2), 8) == 2
    assert check_world_size(parallel(cp=2, ep=4), 4) == 2
    assert refusal(check_world_size, parallel(tp=2, ep=4), 4) == (
        "parallel.expert_model_parallel_size = 4: must divide data (2) x context (1), the ranks "
        "that can share experts; change it, another degree or the number of ranks"
    )


def test_other_ranks_than_the_cluster_has():
    cluster = ClusterConfig(num_nodes=2, gpus_per_node=8)
    assert refusal(check_world_size, parallel(), 8, cluster) == (
        "cluster.num_nodes (2) x cluster.gpus_per_node (8) asks for 16 ranks and 8 were launched; "
        "launch as many, or change cluster"
    )


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        (parallel(tp=4), QWEN3_8B),
        (parallel(tp=8, pp=4), LLAMA_3_1_70B),
        (parallel(tp=8, pp=4, vpp=5), LLAMA_3_1_70B),
        (parallel(tp=3, pp=2, vpp=3), SMOLLM2_135M),
        (parallel(pp=4, first=6), SMOLLM2_135M),
        (parallel(pp=3, first=8, last=4), SMOLLM2_135M),
        (parallel(pp=2, first=14, last=16), SMOLLM2_135M),
        (parallel(pp=3, vpp=2, first=8, last=4), QWEN3_8B),
        (parallel(ep=64), QWEN3_30B_A3B),
        (parallel(tp=4, pp=4, ep=8, sp=True), QWEN3_30B_A3B),
    ],
)
def test_models_that_fit(layout, shape):
    check_model_fits(layout, **shape)


def test_heads_that_do_not_divide():
    assert refusal(check_model_fits, parallel(tp=2), **SMOLLM2_135M) == (
        "the model does not fit the layout:\n"
        "  parallel.tensor_model_parallel_size = 2: must divide the model's num_attention_heads "
        "(9) and num_key_value_heads (3); this model can take 1, 3"
    )


def test_tensor_and_pipeline_are_reported_together():
    assert refusal(check_model_fits, parallel(tp=16, pp=7), **QWEN3_8B) == (
        "the model does not fit the layout:\n"
        "  parallel.tensor_model_parallel_size = 16: must divide the model's num_key_value_heads "
        "(8); this model can take 1, 2, 4, 8\n"
        "  parallel.pipeline_model_parallel_size = 7: 7 equal stages cannot share 36 layers (the "
        "model's 36); change the number of stages, or give the first or last stage its own number "
        "of layers"
    )


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (
            parallel(pp=4, first=5),
            "parallel.pipeline_model_parallel_size = 4: 3 equal stages cannot share 31 layers (the "
            "model's 36 less parallel.num_layers_in_first_pipeline_stage (5))",
        ),
        (parallel(pp=2, first=16, last=16), "0 equal stages cannot share 4 layers"),
        (parallel(pp=3, first=18, last=18), "1 equal stages cannot share 0 layers"),
        # CK-10: 15 layers over two stages; no layer may be lost.
        (parallel(pp=4, first=12, last=9), "2 equal stages cannot share 15 layers"),
        (parallel(pp=2, first=40), "1 equal stages cannot share -4 layers"),
        (
            parallel(pp=4, vpp=2),
            "parallel.virtual_pipeline_model_parallel_size = 2: must divide the 9 layers of each "
            "stage; take a divisor of 9 or remove it",
        ),
        (
            parallel(pp=3, vpp=2, first=9, last=7),
            "must divide the 9 layers of parallel.num_layers_in_first_pipeline_stage",
        ),
    ],
)
def test_stages_that_do_not_divide(layout, text):
    assert text in refusal(check_model_fits, layout, **QWEN3_8B)


def test_experts_that_do_not_divide():
    small = QWEN3_30B_A3B | {"num_experts": 8}
    assert refusal(check_model_fits, parallel(ep=3), **small) == (
        "the model does not fit the layout:\n"
        "  parallel.expert_model_parallel_size = 3: must divide the model's experts (8); this "
        "model can take 1, 2, 4, 8"
    )


def test_expert_parallel_without_experts():
    assert refusal(check_model_fits, parallel(ep=2), **QWEN3_8B) == (
        "the model does not fit the layout:\n"
        "  parallel.expert_model_parallel_size = 2: the model has no experts; set it to 1: the "
        "ranks are data-parallel all the same"
    )


def test_experts_under_tensor_parallelism_need_sequence_parallelism():
    assert refusal(check_model_fits, parallel(tp=2), **QWEN3_30B_A3B) == (
        "the model does not fit the layout:\n"
        "  parallel.sequence_parallel = False: without it each of the 2 tensor-parallel ranks "
        "would send every token to the experts again, and their gradients would count it as "
        "often; set it to true"
    )
