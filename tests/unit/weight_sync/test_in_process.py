import torch

from rl_megatron.weight_sync import InProcessSync


class Policy:
    def named_weights(self):
        yield from {"a": torch.ones(2), "b": torch.zeros(3)}.items()


class Engine:
    def __init__(self):
        self.calls = []

    def wake(self):
        self.calls.append("wake")

    def load_weights(self, weights, policy_version):
        sums = {name: value.sum().item() for name, value in weights}
        self.calls.append((sums, policy_version))

    def sleep(self):
        self.calls.append("sleep")


def test_the_engine_is_awake_with_every_weight_and_the_version_and_sleeps_again():
    engine = Engine()
    with InProcessSync(Policy(), engine).sampling(policy_version=7) as given:
        assert given is engine
        assert engine.calls == ["wake", ({"a": 2, "b": 0}, 7)]
    assert engine.calls[2:] == ["sleep"]
