"""The small checkpoints of tools/parity.py, and the batches that are trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.utils import logging

from rl_megatron.data.examples import Example, PreferencePair
from rl_megatron.data.packing import pack_preferences, pack_sft
from rl_megatron.interfaces.batch import PackedBatch

TEMPERATURE = 0.8
VOCAB_SIZE = 131
# Coefficient of the balance loss of experts in the rows that have it: about 5, it cancels no loss.
BALANCE = 1.0
# 131 tokens are padded to 136 rows on one tensor-parallel rank and to 144 on two.
VOCAB_DIVISOR = 8
# One response is empty, and so is one side of a pair.
PROMPT_TOKENS = (3, 9, 1, 6, 12, 2, 5, 4)
RESPONSE_TOKENS = (7, 2, 19, 1, 5, 0, 11, 8)
# Of the pairs of a reward model, and what it gives to their sequences.
MARGINS = (0.5, 0.0, 1.0, -0.5)
SCORES = (1.0, -0.5, 1.5, -0.3, 0.8, 0.4, 1.2, -0.4)
BATCH_SEED = 7
# Routers that are tried in each layer, and tokens that each expert is to have at least.
ROUTERS = 10_000
FEWEST_TOKENS = 20
# By name: the class of the config, and what is particular. An embedding that is the head as well
# lies on two stages of a pipeline.
MODELS: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "dense": (Qwen3Config, {"tie_word_embeddings": True}),
    "experts": (
        Qwen3MoeConfig,
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        },
    ),
    "scores": (Qwen3Config, {"tie_word_embeddings": True, "num_labels": 1}),
}


def make_model(folder: Path, name: str) -> PreTrainedModel:
    """A small random model of MODELS in float32, saved in `folder`.

    Its layers are as many as two stages of two chunks need. No distribution is flat, and log-probs
    stay below 8 nats as a rule: where they are larger the next float32 is 1e-6 away, and a ratio
    can be no closer than that.
    """
    logging.disable_progress_bar()
    config_class, settings = MODELS[name]
    config = config_class(
        vocab_size=VOCAB_SIZE,
        num_hidden_layers=4,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        **settings,
    )
    kind = AutoModelForSequenceClassification if name == "scores" else AutoModelForCausalLM
    model = kind.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in parameter_name:
                parameter.copy_(1 + 0.1 * noise)
            else:
                is_wide = "embed" in parameter_name or "head" in parameter_name
                parameter.copy_((0.1 if is_wide else 0.15) * noise)
            # A model in bf16 has the same weights.
            parameter.copy_(parameter.bfloat16())
    if name == "scores":
        _set_scores(model)
    if name == "experts":
        _separate_experts(model)
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def _set_scores(model: PreTrainedModel) -> None:
    """Give a reward model the head that scores the sequences of the batch as SCORES says: means
    near 0, or equal ones, would have no digits to compare."""
    _, pairs = _make_pairs(torch.Generator().manual_seed(BATCH_SEED))
    sequences = pairs.tokens.split(pairs.lengths.tolist())
    ends = torch.stack([model.model(tokens[None]).last_hidden_state[0, -1] for tokens in sequences])
    model.score.weight.copy_(torch.linalg.pinv(ends) @ torch.tensor(SCORES))


@torch.no_grad()
def _separate_experts(model: PreTrainedModel) -> None:
    """Give each layer that router, of many random ones, which is surest of its choices.

    The tokens of the batch are 380 choices. In bf16, where a sum is rounded decides those that are
    nearly ties, and a token that goes to another expert is another gradient, not an error.
    """
    generator = torch.Generator().manual_seed(BATCH_SEED)
    _, pairs = _make_pairs(generator)
    for layer in model.model.layers:
        router = layer.mlp.gate
        hidden = _inputs(model, layer.mlp, pairs)
        weights = 0.15 * torch.randn(ROUTERS, *router.weight.shape, generator=generator)
        # A model in bf16 has the same weights.
        weights = weights.bfloat16().float()
        logits = torch.einsum("th,reh->rte", hidden, weights)
        chosen = logits.topk(router.top_k + 1)
        margins = (chosen.values[:, :, -2] - chosen.values[:, :, -1]).amin(dim=1)
        experts = chosen.indices[:, :, :-1].flatten(1)
        loads = torch.zeros(weights.shape[:2]).scatter_add_(1, experts, torch.ones(experts.shape))
        # An expert with few tokens has a gradient of few roundings, which do not even out.
        margins[loads.amin(dim=1) < FEWEST_TOKENS] = 0
        router.weight.copy_(weights[margins.argmax()])


def _inputs(model: PreTrainedModel, module: torch.nn.Module, batch: PackedBatch) -> Tensor:
    """[T, H] what a module of the model is given of the batch, sequence by sequence."""
    seen: list[Tensor] = []
    handle = module.register_forward_pre_hook(lambda _, given: seen.append(given[0].flatten(0, -2)))
    for tokens in batch.tokens.split(batch.lengths.tolist()):
        model(tokens[None])
    handle.remove()
    return torch.cat(seen)


def _make_pairs(generator: torch.Generator) -> tuple[list[Example], PackedBatch]:
    """The sequences of the batch, and the batch of pairs of them."""

    def ids(number: int) -> tuple[int, ...]:
        return tuple(torch.randint(VOCAB_SIZE, (number,), generator=generator).tolist())

    examples = [
        Example(row, ids(prompt), ids(response))
        for row, (prompt, response) in enumerate(zip(PROMPT_TOKENS, RESPONSE_TOKENS, strict=True))
    ]
    sides = zip(examples[0::2], examples[1::2], strict=True)
    return examples, pack_preferences([PreferencePair(i, *pair) for i, pair in enumerate(sides)])


def make_batches(model: PreTrainedModel) -> dict[bool, PackedBatch]:
    """The batch without and with pairs: the same sequences, and every field that a loss reads.

    Log-probs of old policy, engine and reference are those of the model and noise, so that ratios
    lie on both sides of every bound. Advantages and distances to the reference lean to one side,
    and the old policy is some way off: a mean in which everything cancels, or a divergence that is
    nearly 0, has no digits to compare. The engine leans so that the longest response keeps its
    weight where others are masked. A model with a scalar head has none of these fields; its pairs
    ask for margins.
    """
    generator = torch.Generator().manual_seed(BATCH_SEED)
    examples, pairs = _make_pairs(generator)
    if model.config.num_labels == 1:
        return {True: pairs.with_fields(margins=torch.tensor(MARGINS).repeat_interleave(2))}
    batch = pack_sft(examples)
    logprobs = model_logprobs(model, batch)
    noise = torch.randn(4, batch.num_tokens, generator=generator)
    lean = torch.where(batch.segment_ids % 2 == 0, -0.5, 0.5)
    fields = {
        "old_logprobs": logprobs + 0.5 * noise[0],
        "rollout_logprobs": logprobs + 0.5 * noise[0] + 0.3 * noise[1] - 0.1 * lean,
        "ref_logprobs": logprobs + 0.3 * noise[2] + lean,
        "advantages": 1 + noise[3],
    }
    batch = batch.with_fields(desirable=torch.arange(batch.num_sequences) % 2 == 0)
    return {False: batch.with_fields(**fields), True: pairs.with_fields(**fields)}


@torch.no_grad()
def model_logprobs(model: PreTrainedModel, batch: PackedBatch) -> Tensor:
    """[T] log-prob of each token at TEMPERATURE, 0 on first tokens; by transformers."""
    values = []
    for tokens in batch.tokens.split(batch.lengths.tolist()):
        rows = (model(tokens[None]).logits[0, :-1] / TEMPERATURE).log_softmax(dim=1)
        values += [rows.new_zeros(1), rows.gather(1, tokens[1:, None])[:, 0]]
    return torch.cat(values)


def lonely(batches: dict[bool, PackedBatch]) -> dict[bool, PackedBatch]:
    """The sequence with the longest response, and its pair, alone."""
    longest = {False: [2], True: [2, 3]}
    return {paired: batch.select(longest[paired]) for paired, batch in batches.items()}
