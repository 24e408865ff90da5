import math

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import interpreter_builder

from rl_megatron.kernels.linear_logprob.triton_rows import (
    GRADIENT_BLOCK,
    STATISTICS_BLOCK,
    TritonRows,
    gradient_kernel,
    statistics_kernel,
)

ROWS = TritonRows()


def oracle(logits, column, inv_temperature, softcap):
    """(m, s, u, z_y), log-prob and entropy in float64; log-prob of no target is -ln sum e^z."""
    x = logits.double()
    z = inv_temperature.double()[:, None] * (
        x if softcap is None else softcap * (x / softcap).tanh()
    )
    m = z.max(dim=1).values
    shifted = z - torch.where(m == -math.inf, 0.0, m)[:, None]
    e = shifted.exp()
    u = torch.where(e > 0, e * shifted, 0.0).sum(1)
    here = (column >= 0) & (column < z.shape[1])
    z_y = torch.where(here, z.gather(1, column.clamp(0, z.shape[1] - 1)[:, None])[:, 0], 0.0)
    return torch.stack([m, e.sum(1), u, z_y])


def gradient_oracle(logits, column, inv_temperature, softcap, g_logprob, g_entropy):
    """Gradient of g_logprob * log-prob + g_entropy * entropy by autograd, in float64."""
    x = logits.double().requires_grad_()
    z = inv_temperature.double()[:, None] * (
        x if softcap is None else softcap * (x / softcap).tanh()
    )
    log_p = z.log_softmax(1)
    p = log_p.exp()
    entropy = -torch.where(p > 0, p * log_p, 0.0).sum(1)
    here = (column >= 0) & (column < z.shape[1])
    picked = z.gather(1, column.clamp(0, z.shape[1] - 1)[:, None])[:, 0]
    logprob = torch.where(here, picked, 0.0) - z.logsumexp(1)
    (g_logprob.double() * logprob + g_entropy.double() * entropy).sum().backward()
    assert x.grad is not None
    return x.grad


def case(num_rows, width, seed=0, spread=4.0):
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(num_rows, width, generator=generator)
    column = torch.randint(width, (num_rows,), generator=generator)
    inv_temperature = 0.5 + torch.rand(num_rows, generator=generator)
    return logits, column, inv_temperature


def finished(statistics):
    """top, ln s and entropy, as the head hands them to `gradient`."""
    m, s, u, _ = statistics
    return m.float(), s.log().float(), (s.log() - u / s).float()


def both(logits, column, inv_temperature, softcap, g_logprob, g_entropy, dtype=torch.float32):
    """The gradient as the kernel and as the oracle have it."""
    top, log_sum, entropy = finished(oracle(logits, column, inv_temperature, softcap))
    got = ROWS.gradient(
        logits.clone(), column, inv_temperature, softcap, top, log_sum, entropy,
        g_logprob, g_entropy, dtype,
    )  # fmt: skip
    assert got.dtype == dtype
    want = gradient_oracle(logits, column, inv_temperature, softcap, g_logprob, g_entropy)
    return got.double(), want


# A row alone, one block to the last column, one column beyond, and several blocks.
@pytest.mark.parametrize("width", [1, 5, 4096, 4097, 9001])
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_statistics_against_float64(width, softcap):
    logits, column, inv_temperature = case(4, width, seed=width)
    column[1], column[2] = -1, width
    got = ROWS.statistics(logits, column, inv_temperature, softcap).double()
    want = oracle(logits, column, inv_temperature, softcap)
    assert got[3, 1] == got[3, 2] == 0
    # z is rounded to float32 where it enters: half a unit in the last place of up to 32.
    assert torch.allclose(got[0], want[0], rtol=1.2e-7, atol=0 if softcap is None else 2e-6)
    assert torch.allclose(got[3], want[3], rtol=1.2e-7, atol=0 if softcap is None else 2e-6)
    slack = 1 if softcap is None else 8
    assert torch.allclose(got[1], want[1], rtol=3e-7 * slack, atol=0)
    entropy = [x[1].log() - x[2] / x[1] for x in (got, want)]
    assert torch.allclose(*entropy, rtol=0, atol=1e-6 * slack)


@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("width", [1, 515, 4097])
def test_gradient_against_float64(width, softcap):
    logits, column, inv_temperature = case(5, width, seed=width)
    column[1], column[2] = -1, width
    generator = torch.Generator().manual_seed(1)
    g_logprob, g_entropy = torch.randn(2, 5, generator=generator)
    g_logprob[3], g_entropy[4] = 0, 0
    got, want = both(logits, column, inv_temperature, softcap, g_logprob, g_entropy)
    scale = want.norm(dim=1) + 1e-3
    assert ((got - want).norm(dim=1) / scale).max() < 2e-6


def test_large_logits_at_a_temperature_keep_their_digits():
    logits, column, inv_temperature = case(4, 600, spread=1.0)
    logits += 300
    column = logits.argmax(1)
    got = ROWS.statistics(logits, column, inv_temperature, None).double()
    want = oracle(logits, column, inv_temperature, None)
    # z - m of the target is exact, so the log-prob has the digits of ln s.
    assert torch.equal(got[0], got[3])
    assert torch.allclose(got[1], want[1], rtol=3e-7, atol=0)


def test_tanh_is_right_close_to_zero_and_far_out():
    x = torch.cat([torch.logspace(-6, 2, 25), -torch.logspace(-6, 2, 25)])
    softcap = 2.0
    one = torch.ones(len(x))
    columns = torch.zeros(len(x), dtype=torch.int64)
    z = ROWS.statistics(x[:, None].clone(), columns, one, softcap)[3].double()
    want = softcap * (x.double() / softcap).tanh()
    assert ((z - want) / want).abs().max() < 4e-7


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_gradient_is_the_fp32_one_rounded(dtype):
    logits, column, inv_temperature = case(3, 5000)
    generator = torch.Generator().manual_seed(1)
    g_logprob, g_entropy = torch.randn(2, 3, generator=generator)
    numbers = (logits, column, inv_temperature, None, g_logprob, g_entropy)
    full = both(*numbers)[0]
    half = both(*numbers, dtype=dtype)[0]
    if dtype == torch.float16:
        assert torch.equal(half, full.half().double())
    else:
        # The interpreter cuts bf16 off instead of rounding it.
        assert ((half - full).abs() <= 2**-7 * full.abs() + 1e-38).all()


def test_the_target_of_a_confident_row_keeps_its_digits_in_bf16():
    logits = torch.tensor([[9.0, 1.0, 0.0]])
    zero, one = torch.zeros(1), torch.ones(1)
    got, want = both(logits, torch.tensor([0]), one, None, one, zero, torch.bfloat16)
    # Of a p that was rounded to bf16 before, 1 - p would be 0 or 2^-8.
    assert got[0, 0].item() == pytest.approx(want[0, 0].item(), rel=2**-7)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_a_row_without_gradient_is_exactly_0_whatever_it_holds(garbage):
    logits, column, inv_temperature = case(3, 600)
    logits[1] = garbage
    g = torch.tensor([1.0, 0.0, -1.0])
    numbers = torch.tensor([0.0, garbage, 0.0])
    got = ROWS.gradient(
        logits.clone(), column, inv_temperature, None, numbers, numbers, numbers, g, g,
        torch.float32,
    )  # fmt: skip
    assert not got[1].any() and got[0].isfinite().all() and got[2].isfinite().all()


def test_a_nan_is_not_hidden_and_stays_in_its_row():
    logits, column, inv_temperature = case(3, 5000)
    clean = ROWS.statistics(logits, column, inv_temperature, None)
    logits[1, 4500] = math.nan
    got = ROWS.statistics(logits, column, inv_temperature, None)
    assert got[1, 1].isnan() and torch.equal(got[:, ::2], clean[:, ::2])
    one = torch.ones(3)
    gradient = ROWS.gradient(
        logits, column, inv_temperature, None, one, one, one, one, one, torch.float32
    )
    assert gradient[1, 4500].isnan() and not gradient[::2].isnan().any()


def test_what_has_no_probability_has_no_gradient():
    logits, column, inv_temperature = case(2, 600)
    logits[:, 100:] = -200.0
    one = torch.ones(2)
    got, _ = both(logits, torch.tensor([3, 4]), inv_temperature, None, one, one)
    assert not got[:, 100:].any() and got[:, :100].all()


def test_no_rows_and_no_columns():
    none = torch.zeros(0)
    columns = torch.zeros(0, dtype=torch.int64)
    assert ROWS.statistics(torch.zeros(0, 5), columns, none, None).shape == (4, 0)
    empty = torch.zeros(2, 0)
    two, columns = torch.ones(2), torch.zeros(2, dtype=torch.int64)
    m, s, u, z_y = ROWS.statistics(empty, columns, two, None)
    assert m.tolist() == [-math.inf] * 2 and not torch.stack([s, u, z_y]).any()
    rest = (two, two, two, two, two, torch.float32)
    assert ROWS.gradient(empty, columns, two, None, *rest).shape == (2, 0)


def merged(shards):
    """Log-prob and entropy of rows whose vocabulary is cut into shards, in float64."""
    parts = torch.stack(shards).double()
    m, s, u, z_y = parts.unbind(1)
    top = m.max(0).values
    shift = torch.where(m == -math.inf, 0.0, m - top)
    s, u = (torch.where(m == -math.inf, 0.0, x * shift.exp()) for x in (s, u + s * shift))
    total = s.sum(0)
    return z_y.sum(0) - top - total.log(), total.log() - u.sum(0) / total


def test_lp_04_a_target_in_another_shard():
    logits = 0.1 * torch.arange(10.0).repeat(4, 1)
    targets, one = torch.tensor([7, 4, 0, 9]), torch.ones(4)
    halves = [logits[:, :5].contiguous(), logits[:, 5:].contiguous()]
    shards = [ROWS.statistics(x, targets - 5 * i, one, None) for i, x in enumerate(halves)]
    logprob, entropy = merged(shards)
    assert logprob.tolist() == pytest.approx([-2.093493, -2.393493, -2.793493, -1.893493], abs=1e-6)
    log_p = logits.double().log_softmax(1)
    want = torch.eye(10)[targets].double() - log_p.exp()
    top = logits.max(1).values
    rest = (top, (logits - top[:, None]).exp().sum(1).log(), entropy.float(), one, torch.zeros(4))
    got = torch.cat(
        [
            ROWS.gradient(x, targets - 5 * i, one, None, *rest, torch.float32)
            for i, x in enumerate(halves)
        ],
        dim=1,
    )
    assert torch.allclose(got.double(), want, rtol=1e-6, atol=1e-7)


@pytest.fixture
def rows_from(monkeypatch):
    """`rows_from(first)` numbers programs from `first` on: one row stands for many."""

    def number_from(first: int) -> None:
        def set_grid_idx(x, y, z):
            interpreter_builder.grid_idx = (first + x, y, z)

        monkeypatch.setattr(interpreter_builder, "set_grid_idx", set_grid_idx)

    return number_from


@pytest.mark.parametrize("row", [14134, 14135, 16383])
def test_lp_05_rows_beyond_32_bits(row, rows_from, tmp_path):
    width, num_rows = 151936, 16384
    # A file with holes: only the rows that are touched take memory.
    file = np.memmap(tmp_path / "logits", dtype=np.float32, mode="w+", shape=(num_rows, width))
    logits = torch.from_numpy(file)
    values = ((torch.arange(width) * 37 + row * 11) % 1009).float() / 100
    logits[row] = values
    column = torch.zeros(num_rows, dtype=torch.int64)
    column[row] = 150001
    numbers = torch.ones(num_rows)
    want = oracle(values[None], column[row : row + 1], numbers[:1], None)
    out = start_of_rows(rows_from, row, logits, column, numbers)
    assert torch.allclose(out, want[:, 0].float(), rtol=3e-7)
    top, log_sum, entropy = (x.expand(num_rows).contiguous() for x in finished(want))
    expected = gradient_oracle(
        values[None], column[row : row + 1], numbers[:1], None, numbers[:1], numbers[:1]
    )[0]
    start_of_gradient(rows_from, row, logits, column, numbers, top, log_sum, entropy)
    assert (logits[row].double() - expected).norm() / expected.norm() < 2e-6


def start_of_rows(rows_from, row, logits, column, numbers) -> Tensor:
    """The statistics kernel on one row of many."""
    rows_from(row)
    out = torch.zeros(4, len(logits))
    statistics_kernel[(1,)](
        logits, column, numbers, out, 1.0, len(logits), logits.shape[1],
        HAS_CAP=False, BLOCK=STATISTICS_BLOCK,
    )  # fmt: skip
    return out[:, row]


def start_of_gradient(rows_from, row, logits, column, numbers, top, log_sum, entropy) -> None:
    """The gradient kernel on one row of many, in place."""
    rows_from(row)
    gradient_kernel[(1, -(-logits.shape[1] // GRADIENT_BLOCK))](
        logits, logits, column, numbers, top, log_sum, entropy, numbers, numbers, 1.0,
        logits.shape[1], HAS_CAP=False, BLOCK=GRADIENT_BLOCK,
    )  # fmt: skip


def test_lp_06_logits_of_bf16_give_fp32_log_probs():
    hidden = torch.zeros(2, 8, dtype=torch.bfloat16)
    hidden[:, 0] = 8.0
    weight = torch.zeros(1000, 8, dtype=torch.bfloat16)
    weight[17, 0] = 1.0
    logits = ROWS.logits(hidden, weight)
    statistics = ROWS.statistics(logits, torch.tensor([17, 5]), torch.ones(2), None)
    logprob, _ = merged([statistics])
    assert logits.dtype == torch.float32
    assert logprob.tolist() == pytest.approx([-0.289026, -8.289026], abs=1e-6)


@pytest.mark.parametrize("cuts", [[3], [2, 1]])
def test_lp_09_minus_inf_logits(cuts):
    logits = torch.tensor([[0.0, 0.0, -math.inf]])
    one, target = torch.ones(1), torch.tensor([0])
    first, shards = 0, []
    for part in logits.split(cuts, dim=1):
        shards.append(ROWS.statistics(part.contiguous(), target - first, one, None))
        first += part.shape[1]
    logprob, entropy = merged(shards)
    assert entropy.item() == pytest.approx(math.log(2), abs=1e-6)
    assert logprob.item() == pytest.approx(-math.log(2), abs=1e-6)
    numbers = (torch.zeros(1), torch.full((1,), math.log(2)), entropy.float(), one, one)
    got = ROWS.gradient(logits, target, one, None, *numbers, torch.float32)
    assert got[0].tolist() == pytest.approx([0.5, -0.5, 0.0], abs=1e-6) and got[0, 2] == 0


def test_lp_09_a_row_of_nothing_but_minus_inf_is_reported():
    logits = torch.full((1, 5000), -math.inf)
    m, s, u, _ = ROWS.statistics(logits, torch.tensor([0]), torch.ones(1), None)
    assert m.item() == -math.inf and s.item() == u.item() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_accumulate_in_fp32(dtype):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(6, 33, generator=generator).to(dtype)
    weight = torch.randn(50, 33, generator=generator).to(dtype)
    dlogits = torch.randn(6, 50, generator=generator).to(dtype)
    into = torch.ones(50, 33)
    ROWS.add_weight_gradient(into, dlogits, hidden)
    x, w, d = (t.double() for t in (hidden, weight, dlogits))
    pairs = [
        (ROWS.logits(hidden, weight), x @ w.t()),
        (ROWS.hidden_gradient(dlogits, weight), d @ w),
        (into, 1 + d.t() @ x),
    ]
    for got, want in pairs:
        assert got.dtype == torch.float32
        assert (got.double() - want).norm() / want.norm() < 3e-7
