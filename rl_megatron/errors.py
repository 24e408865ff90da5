"""The errors a user can cause. Each message names the setting, its value and the remedy."""


class RLMegatronError(Exception):
    """What every error of this package is; the entry points print it without a traceback."""


class ConfigError(RLMegatronError):
    """A run that is described wrongly: a key, a value, or two settings that do not fit."""


class DataError(RLMegatronError):
    """Data or a tokenizer that cannot be trained on as it is."""


class CheckpointError(RLMegatronError):
    """A checkpoint or a model folder that is missing, incomplete or not the expected one."""


class RolloutError(RLMegatronError):
    """An engine or a reward that returned something which must not be trained on."""


class NumericsError(RLMegatronError):
    """Numbers that show that a run is broken: not finite, or an identity that does not hold."""
