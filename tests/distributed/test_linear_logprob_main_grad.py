"""The head's gradient under Megatron's DDP: in float32, once, together with the embedding's."""

import pytest
import torch

VOCAB, WIDTH, TOKENS = 40, 16, 30


def micro_batches():
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randint(0, VOCAB - 5, (TOKENS,), generator=generator),
            torch.randint(0, VOCAB - 5, (TOKENS,), generator=generator),
            torch.randn(2, TOKENS, generator=generator),
        )
        for _ in range(3)
    ]


def initial(dtype):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(VOCAB, WIDTH, generator=generator).to(dtype) for _ in range(2)]


class Model(torch.nn.Module):
    """An embedding and a head, one matrix or two."""

    def __init__(self, dtype, tied, one_pass):
        super().__init__()
        first, second = initial(dtype)
        self.embedding = torch.nn.Parameter(first)
        self.head = self.embedding if tied else torch.nn.Parameter(second)
        self.one_pass = one_pass
        if tied:
            # As Megatron's language models do where one stage has both.
            self.embedding.zero_out_wgrad = True

    def forward(self, tokens, targets, g):
        from rl_megatron.kernels.linear_logprob import linear_logprob

        hidden = torch.nn.functional.embedding(tokens, self.embedding)
        expected = (lambda rows, *_: (g[0][rows], g[1][rows])) if self.one_pass else None
        values = linear_logprob(hidden, self.head, targets, 0.7, VOCAB - 5, token_gradient=expected)
        return (torch.stack(values) * g).sum()


def ddp_job(dtype, tied, one_pass, overlap):
    """main_grad of the parameters after three micro-batches, and what autograd was given."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    from tests.helpers.megatron_job import start

    start("tp1")
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=overlap)
    config = TransformerConfig(num_layers=1, hidden_size=WIDTH, num_attention_heads=1)
    model = Model(dtype, tied, one_pass)
    wrapped = DistributedDataParallel(config, settings, model)
    # Twice: what one step leaves behind must not reach the next.
    for _ in range(2):
        wrapped.zero_grad_buffer()
        for tokens, targets, g in micro_batches():
            wrapped(tokens, targets, g).backward()
            assert model.head.grad is None
        assert model.head.grad_added_to_main_grad
    assert model.head.main_grad.dtype == torch.float32
    return [p.main_grad.detach().clone() for p in (model.embedding, model.head)]


def expected_gradients(dtype, tied):
    from rl_megatron.kernels.linear_logprob.reference import plain_logprob

    leaves = [w.double().requires_grad_() for w in initial(dtype)]
    embedding, head = (leaves[0], leaves[0]) if tied else leaves
    total = 0.0
    for tokens, targets, g in micro_batches():
        hidden = torch.nn.functional.embedding(tokens, embedding)
        values = plain_logprob(hidden, head, targets, 0.7, VOCAB - 5)
        total = total + (torch.stack(values) * g).sum()
    return torch.autograd.grad(total, [embedding, head])


@pytest.mark.parametrize("one_pass", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_main_grad_is_the_gradient(pool, dtype, tied, one_pass):
    (found,) = pool(1).run(ddp_job, dtype, tied, one_pass, False)
    expected = expected_gradients(dtype, tied)
    # The gradient of the embedding goes through the hidden states' dtype; the head's does not.
    through_hidden = 2e-6 if dtype == torch.float32 else 4e-3
    tolerances = (through_hidden, through_hidden if tied else 2e-6)
    for value, want, tolerance in zip(found, expected, tolerances, strict=True):
        assert (value - want).norm() <= tolerance * want.norm()
    if not tied:
        assert not found[1][VOCAB - 5 :].any()


def test_gradients_that_are_sent_while_others_are_computed(pool):
    # Megatron's hook insists on a gradient then, and sends the buffer when it has seen all.
    (found,) = pool(1).run(ddp_job, torch.float32, True, False, True)
    expected = expected_gradients(torch.float32, True)
    assert (found[0] - expected[0]).norm() <= 2e-6 * expected[0].norm()
