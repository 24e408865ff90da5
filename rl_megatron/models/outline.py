"""Reading the config.json of any model that transformers builds."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from rl_megatron.errors import CheckpointError
from rl_megatron.models.families.common import has_scalar_head, read_config_json
from rl_megatron.models.shape import ModelOutline

# They name things, limit lengths or start weights, and change no log-prob.
_NO_NUMBER = {
    "_name_or_path",
    "architectures",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "id2label",
    "initializer_range",
    "label2id",
    "max_position_embeddings",
    "pad_token_id",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}


def read_outline(hf_folder: Path) -> ModelOutline:
    """The outline of the model whose config.json lies in a folder.

    Raises:
        CheckpointError: transformers does not know the config, or builds no language model of it.
            The message names the folder.
    """
    given, config = read_config_json(hf_folder), read_config(hf_folder)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING or config.is_encoder_decoder:
        raise CheckpointError(
            f"{hf_folder}: transformers builds no causal language model of model_type "
            f"{config.model_type!r}. Use another model."
        )
    text = config.get_text_config()
    if text is not config:
        raise CheckpointError(
            f"{hf_folder}: model_type {config.model_type!r} holds more than a language model, and "
            "only text is trained: nothing would reach the rest. Save its language model alone, as "
            f"model_type {text.model_type!r}."
        )
    try:
        return ModelOutline(
            family=config.model_type,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            initializer_range=float(getattr(config, "initializer_range", 0.02)),
            scalar_head=has_scalar_head(given),
            settings={name: value for name, value in given.items() if name not in _NO_NUMBER},
        )
    except (AttributeError, CheckpointError) as error:
        raise CheckpointError(f"{hf_folder}: {error}") from error


def read_config(hf_folder: Path) -> PreTrainedConfig:
    """transformers' config of the model in a folder.

    Raises:
        CheckpointError: There is none, it is broken, or transformers does not know its model_type.
    """
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            hf_folder, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, TypeError, StrictDataclassError) as error:
        raise CheckpointError(
            f"{hf_folder}/config.json cannot be read as a model's: {error}. Use a model that the "
            "installed transformers builds without code of the model's own."
        ) from error
    return config
