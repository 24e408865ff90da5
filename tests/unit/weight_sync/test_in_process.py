import torch

from rl_megatron.weight_sync import InProcessSync


class Policy:
    def named_weights(self):
        yield from {"a": torch.ones(2), "b": torch.zeros(3)}.items()


class Engine:
    def load_weights(self, weights, policy_version):
        self.weights, self.version = dict(weights), policy_version


def test_the_engine_gets_every_weight_and_the_version():
    engine = Engine()
    InProcessSync(Policy(), engine).push(policy_version=7)
    assert engine.version == 7
    assert {name: value.sum().item() for name, value in engine.weights.items()} == {"a": 2, "b": 0}
