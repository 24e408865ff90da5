"""Log-probs over a vocabulary that tensor-parallel ranks share: equal to one rank's, to the bit on
all ranks, with the hidden states whole or split."""

import pytest
import torch

from tests.helpers.head_problem import (
    CASES,
    USED,
    gradients,
    head_problem,
    largest_relative,
    relative,
    temperature_of,
)

ROWS, WIDTH, VOCAB = 48, 576, 1003
UNUSED = [3, 11, 12, 23, 47]


def _shard(weight, vocab_size, rank, world_size):
    """This rank's rows of the head, padded to equal sizes with rows that must not be used."""
    rows = -(-vocab_size // (4 * world_size)) * 4
    padded = torch.full((rows * world_size, weight.shape[1]), float("nan"), dtype=weight.dtype)
    padded[:vocab_size] = weight
    return padded[rank * rows : (rank + 1) * rows].clone()


def _harsh(vocab_size, dtype):
    """Logits up to 20 and more, as of a model that is sure of itself."""
    hidden, weight, targets, upstream = head_problem(24, 16, vocab_size, dtype)
    targets[[3, 11, 12, 23]] = -1
    return hidden.detach(), 4 * weight.detach(), targets, upstream


def _real(dtype):
    hidden, weight, targets, upstream = head_problem(ROWS, WIDTH, VOCAB, dtype)
    targets[UNUSED] = -1
    return hidden.detach(), weight.detach(), targets, upstream


def _value_and_gradients(
    hidden, shard, targets, upstream, vocab_size, sequence_parallel, temperature=0.7, softcap=None
):
    """What this rank gets: log-probs, entropy, and the gradients of hidden states and shard."""
    import torch.distributed as dist

    from rl_megatron.kernels.linear_logprob import linear_logprob
    from rl_megatron.parallel.process import start_data_parallel

    start_data_parallel()
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = len(hidden) // size
    mine = hidden[rank * rows : (rank + 1) * rows] if sequence_parallel else hidden
    mine, shard = mine.clone().requires_grad_(), shard.clone().requires_grad_()
    values = linear_logprob(
        mine,
        shard,
        targets,
        temperature,
        vocab_size,
        dist.group.WORLD,
        sequence_parallel,
        softcap=softcap,
    )
    total = sum((v * g).sum() for v, g in zip(values, upstream, strict=True))
    d_hidden, d_shard = torch.autograd.grad(total, [mine, shard])
    return [t.detach() for t in (*values, d_hidden, d_shard)]


def random_job(vocab_size, dtype, sequence_parallel):
    import os

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    hidden, weight, targets, upstream = _harsh(vocab_size, dtype)
    shard = _shard(weight, vocab_size, rank, size)
    return _value_and_gradients(hidden, shard, targets, upstream, vocab_size, sequence_parallel)


def real_job(dtype, sequence_parallel):
    """By case and by what the loss reads."""
    import os

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    hidden, weight, targets, upstream = _real(dtype)
    shard = _shard(weight, VOCAB, rank, size)
    return {
        (case, used): _value_and_gradients(
            hidden,
            shard,
            targets,
            [g * on for g, on in zip(upstream, USED[used], strict=True)],
            VOCAB,
            sequence_parallel,
            temperature_of(case, ROWS),
            CASES[case][1],
        )
        for case in CASES
        for used in USED
    }


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


def _joined(results, sequence_parallel, vocab_size):
    """What the ranks say together, after the look at what must be equal on all of them."""
    first = results[0]
    for logprobs, entropy, d_hidden, _ in results:
        assert torch.equal(logprobs, first[0]) and torch.equal(entropy, first[1])
        assert sequence_parallel or torch.equal(d_hidden, first[2])
    d_hidden = torch.cat([result[2] for result in results]) if sequence_parallel else first[2]
    d_padded = torch.cat([result[3] for result in results])
    assert not d_padded[vocab_size:].any()
    return first[0], first[1], d_hidden, d_padded[:vocab_size]


def _exact(problem, temperature, softcap=None, used=(1.0, 1.0)):
    """The same from all logits in float64."""
    from rl_megatron.kernels.linear_logprob.reference import plain_logprob

    hidden, weight, targets, upstream = problem
    leaves = [x.double().requires_grad_() for x in (hidden, weight)]
    values = plain_logprob(*leaves, targets, temperature, len(weight), softcap)
    upstream = tuple(g * on for g, on in zip(upstream, used, strict=True))
    return *(v.detach() for v in values), *gradients(values, upstream, leaves)


def _assert_rounded_once(found, exact):
    step = torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(found.double(), exact, rtol=step / 2 * 1.01, atol=2e-7)


# 1003 tokens leave padding on the last rank of any number.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("world_size", "sequence_parallel"), [(1, False), (2, False), (2, True), (4, False), (4, True)]
)
def test_the_bounds_of_one_rank_hold_on_any_number(pool, world_size, sequence_parallel, dtype):
    results = pool(world_size).run(real_job, dtype, sequence_parallel)
    for case, used in results[0]:
        found = _joined([result[case, used] for result in results], sequence_parallel, VOCAB)
        exact = _exact(_real(dtype), temperature_of(case, ROWS), CASES[case][1], USED[used])
        if dtype == torch.float32:
            assert largest_relative(found[0], exact[0]) <= 3e-7, case
            assert largest_relative(found[1], exact[1]) <= 1e-6, case
            for value, want in zip(found[2:], exact[2:], strict=True):
                assert relative(value, want) <= 2e-6, (case, used)
        else:
            assert (found[0] - exact[0]).abs().max() <= 5e-6, case
            assert largest_relative(found[1], exact[1]) <= 1e-6, case
            for value, want in zip(found[2:], exact[2:], strict=True):
                _assert_rounded_once(value, want)


# 5 tokens leave the last of four shards with padding only.
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("world_size", "vocab_size"), [(2, 131), (4, 131), (4, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sure_rows_are_as_exact_as_float32_logits_are(
    pool, world_size, vocab_size, sequence_parallel, dtype
):
    results = pool(world_size).run(random_job, vocab_size, dtype, sequence_parallel)
    found = _joined(results, sequence_parallel, vocab_size)
    hidden, weight, targets, upstream = _harsh(vocab_size, dtype)
    exact = _exact((hidden, weight, targets, upstream), 0.7)
    # Logits of 16 to 32 are 1.9e-6 apart, products of them are off by that much, and a log-prob or
    # entropy near 0 has no digits of its own: so relative to the largest logit of the row.
    largest = (hidden.double() @ weight.double().t() / 0.7).abs().amax(dim=1)
    for value, want in zip(found[:2], exact[:2], strict=True):
        assert ((value - want).abs() / torch.maximum(largest, want.abs())).max() <= 3e-7
    for value, want in zip(found[2:], exact[2:], strict=True):
        if dtype == torch.float32:
            assert relative(value, want) <= 2e-6
        else:
            _assert_rounded_once(value, want)


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
    hidden, weight, targets, upstream = _harsh(10, torch.float32)
    targets[:] = -1
    shard = _shard(weight, 10, rank, size)
    return _value_and_gradients(hidden, shard, targets, upstream, 10, sequence_parallel)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_no_rows_at_all_still_take_part_in_every_collective(pool, sequence_parallel):
    for tensors in pool(2).run(empty_job, sequence_parallel):
        assert not any(tensor.any() for tensor in tensors)
