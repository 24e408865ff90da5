"""The whole head on Triton's row kernels, against all logits in float64."""

import pytest
import torch

from rl_megatron.kernels.linear_logprob import linear_logprob
from rl_megatron.kernels.linear_logprob.rows import RowKernels
from rl_megatron.kernels.linear_logprob.triton_rows import TritonRows


def both_ways(hidden, weight, softcap, g_logprob, g_entropy):
    """Log-prob, entropy and both gradients, by Triton and by the reference in float64."""
    targets = torch.tensor([3, -1, 0, 98, 41, 7, 7])
    temperature = torch.linspace(0.6, 1.4, len(targets))
    results = []
    for name, dtype in (("triton", hidden.dtype), ("reference", torch.float64)):
        h, w = (x.detach().to(dtype).requires_grad_() for x in (hidden, weight))
        logprob, entropy = linear_logprob(
            h, w, targets, temperature.double() if name == "reference" else temperature, 99,
            softcap=softcap, implementation=name,
        )  # fmt: skip
        ((g_logprob * logprob).sum() + (g_entropy * entropy).sum()).backward()
        results.append([x.detach().double() for x in (logprob, entropy, h.grad, w.grad)])
    return results


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("entropy_only", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_against_the_reference(dtype, entropy_only, softcap):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 24, generator=generator).to(dtype)
    weight = (0.4 * torch.randn(104, 24, generator=generator)).to(dtype)
    g_logprob, g_entropy = torch.randn(2, 7, generator=generator)
    if entropy_only:
        g_logprob = torch.zeros(7)
    got, want = both_ways(hidden, weight, softcap, g_logprob, g_entropy)
    assert (got[0] - want[0]).abs().max() < 3e-6 and (got[1] - want[1]).abs().max() < 3e-6
    # Gradients in bf16 are rounded once more where they are stored.
    tolerance = 2e-6 if dtype == torch.float32 else 4e-3
    for x, y in zip(got[2:], want[2:], strict=True):
        assert (x - y).norm() / y.norm() < tolerance
    assert not got[3][99:].any() and not got[2][1].any()


def test_it_fits_the_seam():
    assert isinstance(TritonRows(), RowKernels)
