"""Log-probs over a vocabulary that tensor-parallel ranks share: equal to one rank's, to the bit on
all ranks, with the hidden states whole or split."""

import pytest
import torch


def _shard(weight, vocab_size, rank, world_size):
    """This rank's rows of the head, padded to equal sizes with rows that must not be used."""
    rows = -(-vocab_size // (4 * world_size)) * 4
    padded = torch.full((rows * world_size, weight.shape[1]), float("nan"), dtype=weight.dtype)
    padded[:vocab_size] = weight
    return padded[rank * rows : (rank + 1) * rows].clone()


def _problem(vocab_size, dtype):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(24, 16, generator=generator).to(dtype)
    weight = torch.randn(vocab_size, 16, generator=generator).to(dtype)
    targets = torch.randint(0, vocab_size, (24,), generator=generator)
    targets[[3, 11, 12, 23]] = -1
    return hidden, weight, targets, torch.randn(2, 24, generator=generator)


def _value_and_gradients(hidden, shard, targets, upstream, vocab_size, sequence_parallel):
    """What this rank gets: log-probs, entropy, and the gradients of hidden states and shard."""
    import torch.distributed as dist

    from rl_megatron.kernels.linear_logprob import linear_logprob
    from rl_megatron.parallel.process import start_single

    start_single()
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = len(hidden) // size
    mine = hidden[rank * rows : (rank + 1) * rows] if sequence_parallel else hidden
    mine, shard = mine.clone().requires_grad_(), shard.clone().requires_grad_()
    values = linear_logprob(
        mine, shard, targets, 0.7, vocab_size, dist.group.WORLD, sequence_parallel
    )
    total = sum((v * g).sum() for v, g in zip(values, upstream, strict=True))
    d_hidden, d_shard = torch.autograd.grad(total, [mine, shard])
    return [t.detach() for t in (*values, d_hidden, d_shard)]


def random_job(vocab_size, dtype, sequence_parallel):
    import os

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    hidden, weight, targets, upstream = _problem(vocab_size, dtype)
    shard = _shard(weight, vocab_size, rank, size)
    return _value_and_gradients(hidden, shard, targets, upstream, vocab_size, sequence_parallel)


def given_job(shards, targets):
    """One row of hidden state 1 per target; the weights of a shard are its logits times 0.7."""
    import os

    shard = 0.7 * torch.tensor(shards[int(os.environ["RANK"])])[:, None]
    hidden = torch.ones(len(targets), 1)
    upstream = torch.stack([torch.ones(len(targets)), torch.zeros(len(targets))])
    vocab_size = sum(map(len, shards))
    return _value_and_gradients(
        hidden, shard, torch.tensor(targets), upstream, vocab_size, sequence_parallel=False
    )


# 5 tokens leave the last of four shards with padding only.
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("world_size", "vocab_size"), [(2, 131), (4, 131), (4, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_to_one_rank_and_to_the_bit_on_all(
    pool, world_size, vocab_size, sequence_parallel, dtype
):
    from tests.helpers.dense_head import dense_logprobs, gradients

    results = pool(world_size).run(random_job, vocab_size, dtype, sequence_parallel)
    hidden, weight, targets, upstream = _problem(vocab_size, dtype)
    hidden.requires_grad_()
    weight.requires_grad_()
    oracle = dense_logprobs(hidden, weight, targets, 0.7)
    d_hidden, d_weight = gradients(oracle, tuple(upstream), [hidden, weight])
    for rank in range(world_size):
        for value, want, first in zip(results[rank][:2], oracle, results[0][:2], strict=True):
            assert torch.equal(value, first)
            torch.testing.assert_close(value.double(), want, atol=1e-5, rtol=1e-5)
    close = {"atol": 1e-5, "rtol": 1e-5}
    if dtype == torch.bfloat16:
        close = {"atol": 1e-3, "rtol": 2**-7}
    parts = [result[2] for result in results]
    found = torch.cat(parts) if sequence_parallel else parts[0]
    torch.testing.assert_close(found, d_hidden, **close)
    if not sequence_parallel:
        assert all(torch.equal(part, parts[0]) for part in parts)
    d_padded = torch.cat([result[3] for result in results])
    torch.testing.assert_close(d_padded[:vocab_size], d_weight, **close)
    assert not d_padded[vocab_size:].any()


def test_lp_02_every_shard_gets_its_gradient(pool):
    results = pool(2).run(given_job, [[1.0, 2.0], [3.0, 0.0]], [2, -1])
    expected = torch.tensor([-0.087144, -0.236883, 0.356086, -0.032059])
    for logprobs, _, d_hidden, _ in results:
        torch.testing.assert_close(logprobs, torch.tensor([-0.440190, 0.0]), atol=1e-6, rtol=0)
        # The sum over shards; logits are 1/0.7 times hidden state times weight.
        logits = torch.tensor([1.0, 2.0, 3.0, 0.0])
        assert d_hidden[0].item() == pytest.approx(float(expected @ logits), abs=1e-5)
        assert d_hidden[1].item() == 0.0
    d_logits = torch.cat([0.7 * d_shard[:, 0] for *_, d_shard in results])
    torch.testing.assert_close(d_logits, expected, atol=1e-6, rtol=0)


def test_lp_04_targets_on_the_boundaries_of_shards(pool):
    shards = [[0.1 * i for i in range(5)], [0.1 * i for i in range(5, 10)]]
    for logprobs, *_ in pool(2).run(given_job, shards, [7, 4, 0, 9]):
        torch.testing.assert_close(
            logprobs,
            torch.tensor([-2.093493, -2.393493, -2.793493, -1.893493]),
            atol=1e-6,
            rtol=0,
        )


def test_lp_09_a_shard_of_minus_infinity(pool):
    inf = float("inf")
    results = pool(2).run(minus_infinity_job)
    for logprobs, entropy, d_hidden, _ in results:
        torch.testing.assert_close(logprobs, torch.tensor([-0.693147]), atol=1e-6, rtol=0)
        torch.testing.assert_close(entropy, torch.tensor([0.693147]), atol=1e-6, rtol=0)
        assert torch.isfinite(d_hidden).all()
    assert abs(results[0][3]).max() < inf
    assert not results[1][3].any()


def minus_infinity_job():
    """Logits [0, 0 | -inf, -inf]: the products of the second shard overflow."""
    import os

    shard = torch.tensor([[0.0], [0.0]] if os.environ["RANK"] == "0" else [[-1e20], [-3e20]])
    upstream = torch.ones(2, 1)
    return _value_and_gradients(
        torch.tensor([[1e20]]), shard, torch.tensor([0]), upstream, 4, sequence_parallel=False
    )


def empty_job(sequence_parallel):
    import os

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    hidden, weight, targets, upstream = _problem(10, torch.float32)
    targets[:] = -1
    shard = _shard(weight, 10, rank, size)
    return _value_and_gradients(hidden, shard, targets, upstream, 10, sequence_parallel)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_no_rows_at_all_still_take_part_in_every_collective(pool, sequence_parallel):
    for tensors in pool(2).run(empty_job, sequence_parallel):
        assert not any(tensor.any() for tensor in tensors)
