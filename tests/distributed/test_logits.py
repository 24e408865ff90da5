"""Logits of every family under every layout against transformers, in float32."""

import pytest
import torch

from tests.helpers.megatron_job import LAYOUTS, make_backend, start
from tests.helpers.tiny_model import LLAMA3_ROPE, make_tiny_hf

VOCAB = 131
MODELS = {
    "llama3": {"family": "llama", "rope": LLAMA3_ROPE},
    "llama-tied": {"family": "llama", "tie": True},
    "mistral": {"family": "mistral"},
    "qwen2": {"family": "qwen2"},
    "qwen2-tied": {"family": "qwen2", "tie": True},
    "qwen3": {"family": "qwen3"},
    "qwen3-tied": {"family": "qwen3", "tie": True},
}
# In one forward pass; 70 and 100 are beyond the 32 positions that Llama 3's scaling starts from.
LENGTHS = [1, 7, 100, 2, 70, 64, 1, 9, 8]


def make_sequences():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, VOCAB, (n,), generator=generator) for n in LENGTHS]


def logits_job(layout, folder, sequences):
    """[T, V] on the ranks of the last stage, None elsewhere."""
    from rl_megatron.backends.megatron.micro_batch import make_micro_batch
    from rl_megatron.interfaces.batch import PackedBatch

    process = start(layout)
    chunks = make_backend(folder, process, optimizer=None).chunks
    tokens = torch.cat(sequences)
    batch = PackedBatch(
        tokens=tokens,
        cu_seqlens=torch.tensor([0, *map(len, sequences)]).cumsum(0),
        response_mask=torch.zeros(len(tokens), dtype=torch.bool),
        sequence_ids=torch.arange(len(sequences)),
    )
    micro_batch = make_micro_batch(batch, process, packed=True)
    hidden = _hidden_states(chunks, micro_batch)
    if hidden is None:
        return None
    hidden = hidden[:, 0]
    if process.layout.sequence_parallel:
        hidden = _gather(hidden, process)
    head = _gather(chunks[-1].head_weight(), process)[:VOCAB]
    return hidden[: len(tokens)] @ head.t()


@torch.no_grad()
def _hidden_states(chunks, micro_batch):
    """What the model returns without targets, through Megatron's own schedule."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward_step(_, model):
        hidden = model(micro_batch.tokens, micro_batch.context(model), targets=None)
        return hidden, lambda output, non_loss_data: output

    several = len(chunks) > 1
    outputs = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[None] * len(chunks) if several else None,
        model=chunks if several else chunks[0],
        num_microbatches=1,
        seq_length=micro_batch.tokens.shape[1],
        micro_batch_size=1,
        forward_only=True,
        collect_non_loss_data=True,
    )
    return outputs[0] if outputs else None


@torch.no_grad()
def _gather(rows, process):
    """The rows of all tensor-parallel ranks."""
    import torch.distributed as dist

    parts = [torch.empty_like(rows) for _ in range(process.layout.tensor)]
    dist.all_gather(parts, rows.contiguous(), group=process.tensor_group)
    return torch.cat(parts)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The folder of each model and what transformers says, sequence by sequence."""
    from transformers import AutoModelForCausalLM

    found = {}
    for name, settings in MODELS.items():
        folder = make_tiny_hf(
            tmp_path_factory.mktemp(name), vocab_size=VOCAB, width=0.15, **settings
        )
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            rows = [model(sequence[None]).logits[0] for sequence in make_sequences()]
        found[name] = folder, torch.cat(rows)
    return found


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", ["tp1", "tp2", "tp2-sp", "pp2", "tp2-pp2"])
def test_logits_are_those_of_transformers(layout, model, expected, pool):
    folder, logits = expected[model]
    ranks = pool(LAYOUTS[layout].world_size).run(logits_job, layout, folder, make_sequences())
    found = [rank for rank in ranks if rank is not None]
    assert len(found) == LAYOUTS[layout].tensor
    assert logits.abs().max() > 5
    for rank in found:
        assert rank.shape == logits.shape
        assert (rank - logits).abs().max() <= 2e-5
