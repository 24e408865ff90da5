"""What tensor-parallel ranks send each other for log-probs: how often, how much, and for whom."""

import pytest
import torch

VOCAB, WIDTH, TOKENS = 70, 8, 96


def problem(which):
    """Hidden states, head, targets and gradients; `which` rows have a target."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator)
    weight = torch.randn(VOCAB + 2, WIDTH, generator=generator)
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    rows = torch.arange(TOKENS)
    some = torch.rand(TOKENS, generator=generator) < 0.3
    kept = {
        "all": rows >= 0,
        "none": rows < 0,
        "some": some,
        # One rank has nothing, the other all: buffers are as wide as the one that has most.
        "one-sided": (rows < TOKENS // 2) & some,
    }[which]
    targets[~kept] = -1
    g = torch.randn(2, TOKENS, generator=generator)
    g[:, ::5] = 0
    return hidden, weight, targets, g


class Counter(torch.utils._python_dispatch.TorchDispatchMode):
    """Collectives by name, and the float32 that each sends."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            tensors = args[0] if isinstance(args[0], list) else [args[1]]
            self.seen.append((func._opname, sum(t.nbytes for t in tensors) // 4))
        return func(*args, **(kwargs or {}))


def counted_job(which, sequence_parallel, chunk_rows, one_pass):
    """Collectives of the forward and of the backward pass, and the results."""
    import os

    import torch.distributed as dist

    from rl_megatron.kernels.linear_logprob import linear_logprob, tiles
    from rl_megatron.parallel.process import start_data_parallel

    start_data_parallel()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    hidden, weight, targets, g = problem(which)
    rows = TOKENS // size if sequence_parallel else TOKENS
    mine = hidden[rank * rows : (rank + 1) * rows] if sequence_parallel else hidden
    if sequence_parallel:
        # What is not asked for must not travel: not even a NaN of it.
        local = targets[rank * rows : (rank + 1) * rows]
        mine = torch.where(local[:, None] >= 0, mine, torch.nan)
    mine = mine.clone().requires_grad_()
    shard = weight.chunk(size)[rank].clone().requires_grad_()
    whole = tiles.CPU_TILES
    tiles.CPU_TILES = tiles.Tiles(chunk_rows, 16, kept_bytes=0, kept_rows=chunk_rows)
    expected = (lambda rows, *_: (g[0][rows], g[1][rows])) if one_pass else None
    try:
        with Counter() as forward:
            values = linear_logprob(
                mine, shard, targets, 0.7, VOCAB, dist.group.WORLD, sequence_parallel,
                token_gradient=expected,
            )  # fmt: skip
        total = (torch.stack(values) * g).sum()
        with Counter() as backward:
            gradients = torch.autograd.grad(total, [mine, shard])
    finally:
        tiles.CPU_TILES = whole
    return forward.seen, backward.seen, [t.detach() for t in (*values, *gradients)]


def expected_results(which):
    from rl_megatron.kernels.linear_logprob.reference import plain_logprob

    hidden, weight, targets, g = problem(which)
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    values = plain_logprob(hidden, weight, targets, 0.7, VOCAB)
    gradients = torch.autograd.grad((torch.stack(values) * g).sum(), [hidden, weight])
    return [t.detach() for t in (*values, *gradients)]


def room(rows_in_use, size=2):
    """Rows of a buffer that is as wide as the rank with most rows needs, at least 1."""
    return size * max(1, *(int(part.sum()) for part in rows_in_use.chunk(size)))


@pytest.mark.parametrize("chunk_rows", [16, 1024])
@pytest.mark.parametrize("which", ["all", "none", "some", "one-sided"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_one_collective_each_way_whatever_the_chunks(pool, sequence_parallel, which, chunk_rows):
    results = pool(2).run(counted_job, which, sequence_parallel, chunk_rows, False)
    _, _, targets, g = problem(which)
    asked = targets >= 0
    live = asked & (g != 0).any(dim=0)
    for forward, backward, _ in results:
        names = [name for name, _ in forward]
        assert names == ["_allgather_base_"] * (1 + sequence_parallel)
        assert forward[-1][1] == 4 * int(asked.sum())
        if sequence_parallel:
            # Rows with a target travel there, rows with a gradient back, and no others.
            assert forward[0][1] == room(asked) // 2 * WIDTH
            assert backward == [("_reduce_scatter_base_", room(live) * WIDTH)]
        else:
            assert backward == [("allreduce_", int(live.sum()) * WIDTH)]
    check_results(results, which, sequence_parallel)


@pytest.mark.parametrize("which", ["all", "none", "one-sided"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_one_pass_gathers_statistics_a_chunk_at_a_time(pool, sequence_parallel, which):
    results = pool(2).run(counted_job, which, sequence_parallel, 16, True)
    asked = int((problem(which)[2] >= 0).sum())
    for forward, backward, _ in results:
        chunks = max(1, -(-asked // 16))
        assert [name for name, _ in forward] == ["_allgather_base_"] * (chunks + sequence_parallel)
        assert len(backward) == 1
    check_results(results, which, sequence_parallel)


def check_results(results, which, sequence_parallel):
    """Equal on all ranks to the bit, and those of all logits."""
    logprob, entropy, d_hidden, d_weight = expected_results(which)
    close = {"atol": 2e-6, "rtol": 1e-5}
    for *_, (found_logprob, found_entropy, _, _) in results:
        assert torch.equal(found_logprob, results[0][2][0])
        assert torch.equal(found_entropy, results[0][2][1])
        torch.testing.assert_close(found_logprob.double(), logprob, **close)
        torch.testing.assert_close(found_entropy.double(), entropy, **close)
    parts = [tensors[2] for *_, tensors in results]
    found = torch.cat(parts) if sequence_parallel else parts[0]
    torch.testing.assert_close(found.double(), d_hidden, atol=1e-5, rtol=1e-5)
    found = torch.cat([tensors[3] for *_, tensors in results])
    torch.testing.assert_close(found.double(), d_weight, atol=1e-5, rtol=1e-5)
    assert not found[VOCAB:].any()
