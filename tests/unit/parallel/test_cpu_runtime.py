"""Megatron alone sees a torch that speaks for the CPU, and only where there is no CUDA device."""

import subprocess
import sys

import pytest
import torch

from rl_megatron.parallel import cpu_runtime

# In a process of its own: what is installed stays.
ON_A_CPU = """
import torch
plain = {name: getattr(torch, name) for name in ("cuda", "zeros", "empty", "tensor")}
current_device = torch.cuda.current_device
from rl_megatron.parallel import cpu_runtime
cpu_runtime.install()
import sys
import megatron.core.parallel_state as state
view = state.torch
assert view is not torch
for name, module in list(sys.modules.items()):
    seen = getattr(module, "torch", None)
    assert seen is not (torch if name.startswith("megatron.core") else view), name

# Everybody else's torch is what it was.
assert all(getattr(torch, name) is value for name, value in plain.items())
assert torch.cuda.current_device is current_device
assert torch.zeros(2).device.type == "cpu"

# Megatron's answers for the CPU and passes the rest on.
assert view.cuda.current_device() == torch.device("cpu")
assert view.zeros(3, device="cuda").device.type == "cpu"
assert view.empty(3, device=torch.device("cuda", 0)).device.type == "cpu"
assert view.zeros(3, dtype=torch.float64).dtype == torch.float64
assert view.matmul is torch.matmul and view.Tensor is torch.Tensor
assert view.cuda.is_available() is False
with view.cuda.stream(view.cuda.Stream()):
    view.cuda.current_stream().wait_stream(view.cuda.Stream())
    view.cuda.synchronize()

x = torch.ones(2)
assert x.cuda() is x
assert x.type() == "torch.cuda.FloatTensor"
assert x.type(torch.float64).dtype == torch.float64

# A second time nothing is wrapped again.
patched = torch.Tensor.type
cpu_runtime.install()
assert torch.Tensor.type is patched
assert state.torch is view

# The random streams of model parallelism are the CPU generator's.
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
tracker = CudaRNGStatesTracker()
tracker.add("one", 7)
torch.manual_seed(1)
outside = torch.rand(3)
torch.manual_seed(1)
with tracker.fork("one"):
    inside = torch.rand(3)
assert torch.equal(torch.rand(3), outside)
torch.manual_seed(7)
assert torch.equal(torch.rand(3), inside)
print("fine")
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_only_megatron_sees_the_view():
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ON_A_CPU], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "fine"


def test_nothing_is_installed_where_a_cuda_device_exists(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cpu_runtime, "_installed", False)
    assert not cpu_runtime.needed()

    def fail(*_):
        raise AssertionError("something was patched")

    for name in ("_torch_view", "_patch_tensor_methods", "_patch_random", "_patch_experts"):
        monkeypatch.setattr(cpu_runtime, name, fail)
    monkeypatch.setattr(cpu_runtime.importlib, "import_module", fail)
    cpu_runtime.install()
    assert cpu_runtime._installed is False
