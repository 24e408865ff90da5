"""What would be launched on a GPU, without one: how often, for how many bytes, which binaries."""

import inspect
from collections import Counter
from itertools import product

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import make_backend  # noqa: E402

from rl_megatron.kernels.launch import recorded  # noqa: E402
from rl_megatron.kernels.linear_logprob.triton_rows import TritonRows  # noqa: E402
from rl_megatron.kernels.policy_loss import PolicyLossSettings, policy_loss  # noqa: E402
from rl_megatron.kernels.preference_loss import (  # noqa: E402
    PreferenceLossSettings,
    preference_loss,
)
from tools.aot_compile import specialised  # noqa: E402

HOPPER = make_backend(GPUTarget("cuda", 90, 32))
ROWS = TritonRows()
# What torch does on the host alone: room, and other views of what is there.
ON_THE_HOST = {"new_empty", "empty", "empty_like", "select", "slice", "unbind", "detach", "view"}
MODES = ("vanilla", "gspo", "cispo")


class Work(TorchDispatchMode):
    """Counts the operations of torch that would start a kernel or wait for one."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name not in ON_THE_HOST:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def policy_call(settings, num_tokens, with_reference=True, lengths=None, scale=0.5, dtype=None):
    """Forward and backward of the policy loss; numbers are of no account."""
    logprobs = torch.zeros(num_tokens, requires_grad=True)
    entropy = torch.zeros(num_tokens, requires_grad=bool(settings.entropy_coef))
    old, advantages, weights, ref = torch.zeros(4, num_tokens).unbind()
    bounds = torch.tensor(lengths or [0, num_tokens], dtype=dtype or torch.int64)
    upstream = torch.ones((), dtype=torch.float64)
    work = Work()
    with recorded(run=False) as launches, work:
        result = policy_loss(
            settings, logprobs, entropy, old, advantages, weights,
            ref if with_reference else None, bounds, scale,
        )  # fmt: skip
        leaves = [leaf for leaf in (logprobs, entropy) if leaf.requires_grad]
        torch.autograd.grad(result.loss, leaves, upstream)
    return launches, work.counts


def preference_call(settings, num_tokens, num_pairs=1, scale=0.5):
    """Forward and backward of a preference loss."""
    logprobs = torch.zeros(num_tokens, requires_grad=True)
    ref, weights = torch.zeros(2, num_tokens).unbind()
    bounds = torch.linspace(0, num_tokens, 2 * num_pairs + 1).long()
    upstream = torch.ones((), dtype=torch.float64)
    work = Work()
    with recorded(run=False) as launches, work:
        result = preference_loss(settings, logprobs, ref, weights, bounds, scale)
        torch.autograd.grad(result.loss, logprobs, upstream)
    return launches, work.counts


@pytest.mark.parametrize("loss_mode", MODES)
@pytest.mark.parametrize("entropy_coef", [0.0, 0.1])
def test_the_policy_loss_is_two_launches_and_its_gradient_one(loss_mode, entropy_coef):
    settings = PolicyLossSettings(loss_mode, kl_loss_type="k3", entropy_coef=entropy_coef)
    launches, work = policy_call(settings, 1000)
    assert [launch.kernel.__name__ for launch in launches] == ["tokens_kernel", "sums_kernel"]
    assert work == {"mul": 1}


def test_a_preference_loss_is_two_launches_and_its_gradient_one():
    launches, work = preference_call(PreferenceLossSettings(rpo_alpha=1.0), 1000, 3)
    names = [launch.kernel.__name__ for launch in launches]
    assert names == ["sequence_sums_kernel", "pairs_kernel", "spread_kernel"]
    assert not work


def bytes_per_token(launches, num_tokens):
    """Of every array with a number per token that a kernel is given, each once per launch."""
    arrays = [
        arg
        for launch in launches
        for arg in launch.args
        if isinstance(arg, torch.Tensor) and arg.numel() == num_tokens
    ]
    return sum(array.element_size() for array in arrays)


def test_bytes_of_the_grpo_loss():
    num_tokens = 1021
    plain = PolicyLossSettings(kl_loss_type="k3")
    launches, _ = policy_call(plain, num_tokens)
    # Six read, one written. The product with what comes from above: one read, one written.
    assert bytes_per_token(launches, num_tokens) == 28 and 28 + 8 <= 40
    launches, _ = policy_call(PolicyLossSettings(kl_loss_type="k3", entropy_coef=0.1), num_tokens)
    assert bytes_per_token(launches, num_tokens) == 32


def test_bytes_of_the_preference_loss():
    launches, _ = preference_call(PreferenceLossSettings(), 1021, 4)
    assert bytes_per_token(launches, 1021) == 20


def binaries(calls):
    """Which binary each launch of these calls would run, by kernel."""
    found = {}
    for launches in calls:
        for launch in launches:
            options, signature, constants, attributes = specialised(launch, HOPPER)
            key = (str(options), str(signature), str(constants), str(attributes))
            found.setdefault(launch.kernel.__name__, set()).add(key)
    return {name: len(keys) for name, keys in found.items()}


@pytest.mark.parametrize("loss_mode", MODES)
def test_one_binary_per_set_of_flags_of_the_policy_loss(loss_mode):
    calls = [
        policy_call(
            PolicyLossSettings(loss_mode, low, high, 2 + low, "k3", coef, coef),
            num_tokens,
            lengths=lengths,
            scale=1 / num_tokens,
        )[0]
        for num_tokens, lengths, low, high, coef in [
            (1, None, 0.1, 0.2, 1.0),
            (16, [0, 3, 16], 0.2, 0.28, 0.5),
            (1000, [0, 8, 9, 16, 1000], 1.0, 16.0, 0.001),
            (4097, None, 0.5, 1.0, 16.0),
        ]
    ]
    assert binaries(calls) == {"tokens_kernel": 1, "sums_kernel": 1}


def test_one_binary_per_set_of_flags_of_a_preference_loss():
    calls = [
        preference_call(
            PreferenceLossSettings(beta, "sigmoid", beta / 2, beta, beta), *sizes, 1 / beta
        )[0]
        for beta, sizes in product((0.1, 0.5, 1.0), [(2, 1), (16, 2), (1001, 16), (1001, 500)])
    ]
    assert binaries(calls) == {"sequence_sums_kernel": 1, "pairs_kernel": 1, "spread_kernel": 1}


def row_call(num_rows, width, softcap=None, offset=0, dtype=torch.bfloat16):
    """Both row kernels, the numbers of rows cut out of longer ones as tiles of rows are."""
    logits = torch.zeros(num_rows, width)
    numbers = torch.full((num_rows + offset,), 0.7)[offset:]
    column = torch.zeros(num_rows + offset, dtype=torch.int64)[offset:]
    with recorded(run=False) as launches:
        ROWS.statistics(logits, column, numbers, softcap)
        ROWS.gradient(logits, column, numbers, softcap, *[numbers] * 5, dtype)
    return launches


def test_one_binary_per_set_of_flags_of_the_rows():
    even = [
        row_call(n, width, cap, offset)
        for n, width, cap, offset in product((1, 2, 16, 33), (32, 8192), (None,), (0, 1))
    ]
    assert binaries(even) == {"statistics_kernel": 1, "gradient_kernel": 1}
    capped = [row_call(3, 8192, cap) for cap in (1.0, 16.0, 30.0)]
    assert binaries(capped) == {"statistics_kernel": 1, "gradient_kernel": 1}
    # A vocabulary whose rows do not begin where wide loads may is the one thing to have its own.
    assert binaries([*even, row_call(3, 50257), row_call(5, 515)]) == {
        "statistics_kernel": 2,
        "gradient_kernel": 2,
    }


def test_numbers_of_the_losses_reach_the_kernels_in_float64():
    launches = [*policy_call(PolicyLossSettings(), 10)[0]]
    launches += preference_call(PreferenceLossSettings(), 10)[0]
    wanted = {
        "tokens_kernel": ("low", "high", "dual", "kl_coef", "entropy_coef"),
        "pairs_kernel": ("beta", "label_smoothing", "simpo_gamma", "nll_weight", "pair_scale"),
    }
    seen = set()
    for launch in launches:
        for name in wanted.get(launch.kernel.__name__, ()):
            assert specialised(launch, HOPPER)[1][name] == "fp64"
            seen.add(name)
    assert len(seen) == 10


def test_every_launch_is_written_down():
    # `launch` is how launches are counted and compiled ahead of time; nothing may go past it.
    import rl_megatron.kernels.linear_logprob.triton_rows as rows
    import rl_megatron.kernels.policy_loss.door as policy
    import rl_megatron.kernels.preference_loss.door as preference

    for module in (rows, policy, preference):
        assert "_kernel[" not in inspect.getsource(module)


def test_float64_logits_are_refused():
    one = torch.ones(1, dtype=torch.float64)
    with pytest.raises((AssertionError, TypeError), match=r"float64|float32"):
        ROWS.statistics(torch.zeros(1, 4, dtype=torch.float64), one.long(), one, None)
