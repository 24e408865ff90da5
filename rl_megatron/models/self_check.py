"""Whether a transformers model can be run as we run it: found before training, on random tokens.

Any architecture is taken, and what its code does is not known beforehand: whether its head does
more than we do, sees padding to the right, or sees the sequence before in a packed row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rl_megatron.errors import CheckpointError, ConfigError
from rl_megatron.interfaces.batch import PackedBatch
from rl_megatron.models.transformers_head import LogprobHead
from rl_megatron.models.transformers_policy import TransformersPolicy

# The second sequence is far from the place where it would begin alone.
_LENGTHS = [40, 8]


def check_policy(
    policy: TransformersPolicy,
    packed: bool,
    device: torch.device,
    run: Callable[..., tuple[Tensor, ...]] | None = None,
) -> None:
    """Run two short sequences together and alone. Collective, where a forward pass is.

    Args:
        policy: The model with its head.
        packed: Whether sequences are to be packed.
        device: The model's.
        run: The policy's forward pass, where it is not called directly.

    Raises:
        CheckpointError: The model does more, or sees more, than is implemented.
        ConfigError: Sequences see each other when packed.
    """
    run = run or policy
    batch = _random_batch(policy.model.config.get_text_config().vocab_size)
    limit = largest_rounding(policy.model.dtype)
    family = f"model_type {policy.model.config.model_type}"
    with torch.no_grad():
        parts = [batch.select([i]).to(device) for i in range(len(_LENGTHS))]
        alone = torch.cat([run(part)[0] for part in parts])
        padded = run(batch.to(device))[0]
        if _distance(padded, alone) > limit:
            raise CheckpointError(
                f"{family}: a sequence sees what stands to the right of it. Only causal models can "
                "be trained."
            )
        if isinstance(policy.head, LogprobHead):
            own = torch.cat([_own_logprobs(policy, policy.head, part) for part in parts])
            if _distance(own, alone) > limit:
                raise CheckpointError(
                    f"{family}: its head does more than a product with its weight, and what is not "
                    "known. Use another model."
                )
        if packed and _distance(_packed(run, batch.to(device), family), alone) > limit:
            raise ConfigError(
                f"train.packed = true: sequences of {family} see each other when packed; set "
                "train.packed=false"
            )


def largest_rounding(dtype: torch.dtype) -> float:
    """Mean difference of log-probs, in a model of this dtype, above which it is none."""
    return 1e-3 if dtype == torch.float32 else 0.2


def _random_batch(vocab_size: int) -> PackedBatch:
    generator = torch.Generator().manual_seed(0)
    size = sum(_LENGTHS)
    bounds = torch.tensor([0, *_LENGTHS]).cumsum(0)
    asked = torch.ones(size, dtype=torch.bool)
    asked[bounds[:-1]] = False
    tokens = torch.randint(vocab_size, (size,), generator=generator)
    return PackedBatch(tokens, bounds, asked, torch.arange(len(_LENGTHS)))


def _distance(found: Tensor, expected: Tensor) -> float:
    """Of the sequence that is furthest off: its mean over tokens, or of its score."""
    difference = (found.float() - expected.float()).abs()
    if len(difference) == len(_LENGTHS):
        # Scores have no scale of their own.
        return float((difference / expected.float().abs().clamp(min=1)).max())
    return max(float(part.mean()) for part in difference.split(_LENGTHS))


def _own_logprobs(policy: TransformersPolicy, head: LogprobHead, batch: PackedBatch) -> Tensor:
    """[T] of one sequence, as transformers has them."""
    tokens = batch.tokens[None]
    # No token is padding, whatever its id.
    output = policy.model(tokens, attention_mask=torch.ones_like(tokens), use_cache=False)
    logits = output.logits[0, :-1].float()
    logprobs = (logits / head.temperature).log_softmax(1).gather(1, batch.tokens[1:, None])
    return torch.nn.functional.pad(logprobs[:, 0], (1, 0))


def _packed(run: Callable[..., tuple[Tensor, ...]], batch: PackedBatch, family: str) -> Tensor:
    try:
        return run(batch, True)[0]
    except (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError) as error:
        raise ConfigError(
            f"train.packed = true: transformers' code of {family} takes no packed sequences "
            f"({type(error).__name__}: {error}); set train.packed=false"
        ) from error
