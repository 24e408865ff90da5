"""Row kernels of each implementation against the formulas in float64, one tile at a time."""

import pytest
import torch

from rl_megatron.errors import ConfigError
from rl_megatron.kernels import native
from rl_megatron.kernels.linear_logprob import choose
from rl_megatron.kernels.linear_logprob.choose import describe, row_kernels
from rl_megatron.kernels.linear_logprob.merge import finish, merge

CPU = torch.device("cpu")


@pytest.fixture(params=["torch", "cpu"])
def kernels(request):
    return row_kernels(request.param, CPU)


def tile(rows, width, seed=0):
    """Logits from nearly flat to nearly one-hot, targets in and around the tile."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, width, generator=generator)
    logits *= torch.tensor([0.01, 1.0, 5.0, 20.0])[torch.arange(rows) % 4][:, None]
    column = torch.randint(-3, width + 3, (rows,), generator=generator)
    inv_temperature = torch.rand(rows, generator=generator) + 0.5
    return logits, column, inv_temperature


def scaled(logits, inv_temperature, softcap):
    x = logits.double()
    if softcap is not None:
        x = softcap * torch.tanh(x / softcap)
    return x * inv_temperature.double()[:, None]


@pytest.mark.parametrize("softcap", [None, 3.0, 30.0])
@pytest.mark.parametrize(("rows", "width"), [(5, 1), (4, 7), (4, 8), (7, 13), (9, 1024), (6, 3001)])
def test_statistics(kernels, rows, width, softcap):
    logits, column, inv_temperature = tile(rows, width)
    found = kernels.statistics(logits.clone(), column, inv_temperature, softcap)
    assert found.dtype == torch.float32
    z = scaled(logits, inv_temperature, softcap)
    m = z.max(dim=1).values
    e = (z - m[:, None]).exp()
    here = (column >= 0) & (column < width)
    z_y = z.gather(1, column.clamp(0, width - 1)[:, None])[:, 0]
    close = {"rtol": 3e-6, "atol": 1e-6}
    torch.testing.assert_close(found[0].double(), m, rtol=3e-7, atol=1e-6)
    torch.testing.assert_close(found[1].double(), e.sum(1), **close)
    torch.testing.assert_close(found[2].double(), (e * (z - m[:, None])).sum(1), **close)
    torch.testing.assert_close(found[3].double(), torch.where(here, z_y, 0.0), rtol=3e-7, atol=1e-6)


@pytest.mark.parametrize("softcap", [None, 3.0, 30.0])
@pytest.mark.parametrize(("rows", "width"), [(5, 1), (4, 8), (7, 13), (9, 1024), (6, 3001)])
def test_gradient(kernels, rows, width, softcap):
    logits, column, inv_temperature = tile(rows, width)
    g = torch.randn(2, rows, generator=torch.Generator().manual_seed(1))
    exact = logits.double().requires_grad_()
    z = exact if softcap is None else softcap * torch.tanh(exact / softcap)
    log_p = (z * inv_temperature.double()[:, None]).log_softmax(dim=1)
    entropy = -(log_p.exp() * log_p).sum(1)
    # What the kernel itself says of the rows, as in the head: the top that is subtracted must be
    # the row's own largest z to the bit. Rounded from float64 it is another float32 where a cap
    # took part, at 21 one that is 1.9e-6 away, and every p of the row is off by as much.
    statistics = kernels.statistics(logits.clone(), column, inv_temperature, softcap)
    row = finish(merge(statistics[None])).to(torch.float32)
    found = kernels.gradient(
        logits.clone(), column, inv_temperature, softcap,
        row.top, row.log_sum, row.entropy, g[0], g[1], torch.float32,
    )  # fmt: skip
    # By hand up to z, as a target may be another tile's; on to the logits by autograd.
    p = log_p.detach().exp()
    here = (column >= 0) & (column < width)
    dz = -g[0].double()[:, None] * p
    dz -= g[1].double()[:, None] * p * (log_p.detach() + entropy.detach()[:, None])
    dz[here, column[here]] += g[0].double()[here]
    (expected,) = torch.autograd.grad(z, exact, dz * inv_temperature.double()[:, None])
    assert (found - expected).norm() <= 2e-6 * expected.norm()


def test_a_nan_is_not_lost_and_minus_infinity_adds_nothing(kernels):
    logits = torch.randn(3, 2100, generator=torch.Generator().manual_seed(0))
    logits[0, 1500] = float("nan")
    logits[1, 1:] = -torch.inf
    logits[2] = -torch.inf
    column = torch.tensor([0, 0, 7])
    m, s, u, z_y = kernels.statistics(logits, column, torch.ones(3), None)
    assert s[0].isnan()
    assert (m[1], s[1], u[1], z_y[1]) == (logits[1, 0], 1.0, 0.0, logits[1, 0])
    assert (m[2], s[2], u[2], z_y[2]) == (-torch.inf, 0.0, 0.0, -torch.inf)


def test_auto_is_compiled_on_a_cpu():
    assert row_kernels("auto", CPU).name == "cpu"
    assert describe("auto", CPU).startswith("cpu (compiled, ")
    assert describe("torch", CPU) == "torch"
    assert describe("reference", CPU).startswith("reference")


def test_auto_on_a_gpu_is_triton_but_for_float64():
    pytest.importorskip("triton")
    cuda = torch.device("cuda")
    assert row_kernels("auto", cuda).name == row_kernels("auto", cuda, torch.bfloat16).name
    assert row_kernels("auto", cuda).name == "triton"
    assert row_kernels("auto", cuda, torch.float64).name == "torch"


@pytest.mark.parametrize("name", ["tritn", "", "reference"])
def test_an_unknown_name_is_refused_with_the_ones_there_are(name):
    with pytest.raises(ConfigError, match=r"kernels\.linear_logprob.*auto, cpu, triton, torch"):
        row_kernels(name, CPU)


def test_the_compiled_ones_are_for_a_cpu():
    with pytest.raises(ConfigError, match=r"kernels\.linear_logprob: cpu .* not on cuda"):
        row_kernels("cpu", torch.device("cuda"))


def test_without_a_compiler_torch_is_used_and_says_why_once(monkeypatch, caplog):
    def refuse(source):
        raise native.NativeError("no C++ compiler today")

    monkeypatch.setattr(native, "load", refuse)
    for cached in (choose._row_kernels, choose._compiled_rows):
        cached.cache_clear()
    try:
        assert [row_kernels("auto", CPU).name for _ in range(2)] == ["torch"] * 2
        assert caplog.text.count("no C++ compiler today") == 1
        assert "no C++ compiler today" in describe("auto", CPU)
        with pytest.raises(ConfigError, match=r"kernels\.linear_logprob.*no C\+\+ compiler today"):
            row_kernels("cpu", CPU)
    finally:
        for cached in (choose._row_kernels, choose._compiled_rows):
            cached.cache_clear()


def test_a_sure_token_has_no_gradient_at_any_temperature(kernels):
    # p = e^(z - z): a product with 1 / temperature that is rounded here and not there is not 1.
    generator = torch.Generator().manual_seed(0)
    logits = 50 * torch.randn(64, 1, generator=generator)
    inv_temperature = torch.rand(64, generator=generator) + 0.5
    column, zeros, ones = torch.zeros(64, dtype=torch.int64), torch.zeros(64), torch.ones(64)
    top, s, _, z_y = kernels.statistics(logits, column, inv_temperature, None)
    assert torch.equal(s, ones) and torch.equal(z_y, top)
    found = kernels.gradient(
        logits, column, inv_temperature, None, top, zeros, zeros, ones, ones, torch.float32
    )
    assert torch.equal(found, torch.zeros(64, 1))
