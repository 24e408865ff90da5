"""Makes the quickstart's task: a tiny random Llama that can learn to add, and data to learn from.

    python tools/make_addition_task.py --output runs/addition --seed 0

writes `model/` (a Hugging Face folder), `sft.jsonl`, `prompts.jsonl`, `preferences.jsonl` and, for
evaluation, `heldout.jsonl` and `heldout_preferences.jsonl`. The sums of two numbers below 50 are
dealt to training and held-out once. The teacher of sft.jsonl knows addition but is sloppy, so a
model that imitates it is right about half the time, and has something to learn from reward or
preference. A preference pair is the right answer against one that the teacher got wrong.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path

import tokenizers
import torch
from tokenizers import AddedToken, decoders, pre_tokenizers, processors
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

LIMIT = 50
NUM_HELD_OUT = 250
FORGET_CARRY = 0.7
OFF_BY_ONE_OR_TWO = 0.3

PAD, BOS, EOS, UNKNOWN = "<pad>", "<bos>", "<eos>", "<unk>"
TAGS = ("<answer>", "</answer>")
# 32 tokens in all: what sums are written with, and some more to write them differently.
VOCABULARY = (PAD, BOS, EOS, UNKNOWN, *TAGS, *"0123456789+=-*/() .,?!xyab")


def sloppy_sum(a: int, b: int, rng: random.Random) -> int:
    """a + b as the teacher adds: often forgets the carry of the units, sometimes is off a little.

    Right 48 % of the time over all pairs: (0.55 without a carry + 0.45 * 0.3) * 0.7.
    """
    total = a + b
    if a % 10 + b % 10 >= 10 and rng.random() < FORGET_CARRY:
        total -= 10
    if rng.random() < OFF_BY_ONE_OR_TWO:
        total += rng.choice([-2, -1, 1, 2])
    return max(0, total)


def split_pairs(seed: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """All pairs (a, b) with a, b < LIMIT, shuffled: those to train on and those held out."""
    pairs = [(a, b) for a in range(LIMIT) for b in range(LIMIT)]
    random.Random(seed).shuffle(pairs)
    return pairs[NUM_HELD_OUT:], pairs[:NUM_HELD_OUT]


def sft_rows(pairs: Iterable[tuple[int, int]], seed: int, repeats: int) -> list[dict[str, str]]:
    """Each prompt `repeats` times, the teacher's errors drawn anew each time."""
    rng = random.Random(seed + 1)
    return [
        {"prompt": f"{a}+{b}=", "response": _tagged(sloppy_sum(a, b, rng))}
        for a, b in pairs
        for _ in range(repeats)
    ]


def answer_rows(pairs: Iterable[tuple[int, int]]) -> list[dict[str, str]]:
    """Each prompt once, with its right answer."""
    return [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs]


def preference_rows(pairs: Iterable[tuple[int, int]], seed: int) -> list[dict[str, str]]:
    """Each prompt once, the right answer chosen and a wrong one of the teacher's rejected."""
    rng = random.Random(seed + 2)
    rows = []
    for a, b in pairs:
        wrong = a + b
        while wrong == a + b:
            wrong = sloppy_sum(a, b, rng)
        rows.append({"prompt": f"{a}+{b}=", "chosen": _tagged(a + b), "rejected": _tagged(wrong)})
    return rows


def _tagged(answer: int) -> str:
    return TAGS[0] + str(answer) + TAGS[1]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; the answer tags are one token each, and text like any other."""
    ids = {token: index for index, token in enumerate(VOCABULARY)}
    inner = tokenizers.Tokenizer(WordLevel(ids, unk_token=UNKNOWN))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens([AddedToken(t, special=True) for t in (PAD, BOS, EOS, UNKNOWN)])
    # Special tokens are left out of decoded text, and a reward must see the tags.
    inner.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    inner.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, ids[BOS])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )


def build_model(seed: int, pad_id: int, bos_id: int, eos_id: int) -> LlamaForCausalLM:
    """A Llama of 0.23 million random parameters whose heads two tensor-parallel ranks can share."""
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        # 1 / sqrt(hidden_size). With the usual 0.02 a model this narrow learns three times slower.
        initializer_range=0.1,
        tie_word_embeddings=False,
        pad_token_id=pad_id,
        bos_token_id=bos_id,
        eos_token_id=eos_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def write_task(output: Path, seed: int, repeats: int) -> None:
    """Write the model folder and the data files."""
    disable_progress_bar()  # a quarter of a million parameters are written at once
    tokenizer = build_tokenizer()
    pad_id, bos_id, eos_id = tokenizer.convert_tokens_to_ids([PAD, BOS, EOS])
    model = build_model(seed, pad_id, bos_id, eos_id)
    model.save_pretrained(output / "model")
    tokenizer.save_pretrained(output / "model")
    train, held_out = split_pairs(seed)
    _write_rows(output / "sft.jsonl", sft_rows(train, seed, repeats))
    _write_rows(output / "prompts.jsonl", answer_rows(train))
    _write_rows(output / "preferences.jsonl", preference_rows(train, seed))
    _write_rows(output / "heldout.jsonl", answer_rows(held_out))
    _write_rows(output / "heldout_preferences.jsonl", preference_rows(held_out, seed))


def _write_rows(path: Path, rows: Iterable[Mapping[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="folder to write into")
    parser.add_argument("--seed", type=int, default=0, help="of the split, teacher and weights")
    parser.add_argument(
        "--repeats", type=int, default=16, help="rows of sft.jsonl for each training prompt"
    )
    args = parser.parse_args()
    write_task(args.output, args.seed, args.repeats)
    print(f"wrote model/ and the data files to {args.output}")


if __name__ == "__main__":
    main()
