"""What the benches of DPO train: a small random Llama, and pairs as long as those of chats."""

from __future__ import annotations

import json
import math
import random
from argparse import ArgumentParser
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import AddedToken, pre_tokenizers, processors
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from rl_megatron.config import DPORun, build_run

PAD, BOS, EOS, UNKNOWN = SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
SIGMA = 0.9
# Of a sequence, what is prompt: with the same prompt, chosen and rejected differ in length.
PROMPT_SHARE = 0.5


@dataclass(frozen=True)
class TaskSize:
    """What is made.

    Attributes:
        pairs: Rows of the data.
        batch: Pairs of a step.
        median: Tokens of a sequence, log-normal with a sigma of 0.9.
        longest: What would be longer is cut.
        hidden: Width of the model, 64 to a head.
        layers: Depth of the model.
        vocab: Its vocabulary.
    """

    pairs: int
    batch: int
    median: int
    longest: int
    hidden: int
    layers: int
    vocab: int

    @classmethod
    def add_arguments(cls, parser: ArgumentParser, **defaults: int) -> None:
        """A flag for every size."""
        for name, value in defaults.items():
            parser.add_argument(f"--{name}", type=int, default=value)

    def __str__(self) -> str:
        return (
            f"{self.pairs} pairs, {self.batch} a step, median {self.median}, at most "
            f"{self.longest} tokens; {self.layers} layers of {self.hidden}, vocabulary {self.vocab}"
        )


def write_task(folder: Path, size: TaskSize) -> None:
    """`folder/model` (Hugging Face) and `folder/pairs.jsonl`."""
    disable_progress_bar()
    words = [f"w{i}" for i in range(size.vocab - len(SPECIAL_TOKENS))]
    build_tokenizer(words).save_pretrained(folder / "model")
    build_model(size).save_pretrained(folder / "model")
    rng = random.Random(0)
    with (folder / "pairs.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(size.pairs):
            prompt = _draw(rng, PROMPT_SHARE * size.median, PROMPT_SHARE * size.longest)
            room = size.longest - prompt - 2  # BOS and EOS.
            lengths = [
                _draw(rng, (1 - PROMPT_SHARE) * size.median, room) for _ in ("chosen", "rejected")
            ]
            texts = [" ".join(rng.choices(words, k=n)) for n in (prompt, *lengths)]
            row = {"prompt": texts[0], "chosen": f" {texts[1]}", "rejected": f" {texts[2]}"}
            file.write(json.dumps(row) + "\n")


def _draw(rng: random.Random, median: float, longest: float) -> int:
    return max(1, min(int(longest), round(rng.lognormvariate(math.log(median), SIGMA))))


def build_tokenizer(words: list[str]) -> PreTrainedTokenizerFast:
    """One token a word; BOS before a text."""
    ids = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *words])}
    inner = tokenizers.Tokenizer(WordLevel(ids, unk_token=UNKNOWN))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    inner.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, ids[BOS])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token=PAD, bos_token=BOS, eos_token=EOS, unk_token=UNKNOWN
    )


def build_model(size: TaskSize) -> LlamaForCausalLM:
    """Random weights, wide enough that a step moves the loss."""
    heads = max(2, size.hidden // 64)
    config = LlamaConfig(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=3 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=size.hidden // heads,
        max_position_embeddings=size.longest,
        initializer_range=size.hidden**-0.5,
        tie_word_embeddings=False,
        pad_token_id=SPECIAL_TOKENS.index(PAD),
        bos_token_id=SPECIAL_TOKENS.index(BOS),
        eos_token_id=SPECIAL_TOKENS.index(EOS),
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config)


def make_run(folder: Path, size: TaskSize, steps: int, **reference: Any) -> DPORun:
    """The run on the task in `folder`: float32, rows in their order, constant learning rate."""
    return build_run(
        DPORun,
        {
            "name": "bench-dpo",
            "output_dir": str(folder / "run"),
            "model": {"path": str(folder / "model")},
            "data": {
                "train": {"path": str(folder / "pairs.jsonl")},
                "max_length": size.longest,
                "shuffle": False,
            },
            "reference": reference,
            "optimizer": {"lr": 3e-4},
            "train": {"num_steps": steps, "global_batch_size": size.batch},
            "logging": {"tensorboard": False},
        },
    )
