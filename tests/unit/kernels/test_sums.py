"""Sums in three bytes: 16 significant bits between visits, a bfloat16 to hand over."""

import pytest
import torch

from rl_megatron.kernels.linear_logprob.choose import row_kernels


@pytest.fixture(params=["torch", "cpu"])
def kernels(request):
    return row_kernels(request.param, torch.device("cpu"))


def kept(kernels, total):
    high = torch.empty_like(total, dtype=torch.bfloat16)
    tail = torch.empty_like(total, dtype=torch.int8)
    back = torch.empty_like(total)
    kernels.split(total, high, tail)
    kernels.join(high, tail, back)
    return high, back


def test_a_sum_keeps_16_bits_and_hands_over_8(kernels):
    generator = torch.Generator().manual_seed(0)
    total = (
        torch.randn(33, 301, generator=generator)
        * torch.randn(33, 301, generator=generator).mul(9).exp()
    )
    high, back = kept(kernels, total)
    size = total.abs()
    assert ((back - total).abs() <= 2**-16 * size).all()
    assert ((high.float() - total).abs() <= 2**-8 * (1 + 2**-8) * size).all()
    assert torch.equal(kept(kernels, back)[1], back)


def test_what_is_no_ordinary_number_stays_what_it_is(kernels):
    inf, nan = float("inf"), float("nan")
    total = torch.tensor([0.0, -0.0, inf, -inf, nan, 1.0, 1 + 2**-8, -1 - 2**-8])
    high, back = kept(kernels, total)
    torch.testing.assert_close(back, total, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(back.signbit()[:2], total.signbit()[:2])
    # Half way between two of bfloat16's: the one that is larger in size.
    assert high[5:].tolist() == [1.0, 1 + 2**-7, -1 - 2**-7]
    ones = torch.tensor([-1, 2**31 - 1], dtype=torch.int32).view(torch.float32)
    assert kept(kernels, ones)[1].isnan().all()


def test_both_have_the_same_bits():
    total = torch.randn(5, 1001, generator=torch.Generator().manual_seed(1))
    found = [kept(row_kernels(name, torch.device("cpu")), total) for name in ("torch", "cpu")]
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
