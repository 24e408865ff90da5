"""One process, one transformers model: the oracle of the tests, and a backend to debug with."""

from rl_megatron.backends.torch.backend import TorchBackend

__all__ = ["TorchBackend"]
