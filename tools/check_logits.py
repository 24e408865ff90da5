"""Compare a model under Megatron, in any layout, with transformers: the logits of a few texts, or
what a reward model gives to them.

    python tools/check_logits.py models/SmolLM2-135M-Instruct
    torchrun --nproc-per-node 2 tools/check_logits.py FOLDER tensor_model_parallel_size=2

FOLDER is a Hugging Face folder. Computes in float32, prints the largest difference and exits with
1 if it is above --tolerance. `setting=value` are settings of `parallel`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from rl_megatron import log
from rl_megatron.checkpoint.folders import resolve_model_folder
from rl_megatron.config.command_line import parse_parallel
from rl_megatron.config.layout import check_world_size
from rl_megatron.data.examples import Example
from rl_megatron.data.packing import MicroBatching, pack_sft
from rl_megatron.data.tokenizer import load_tokenizer
from rl_megatron.errors import RLMegatronError
from rl_megatron.models.families import read_shape, weight_rules
from rl_megatron.models.transformers_model import load_transformers_model
from rl_megatron.parallel.process import Process, start_megatron, stop
from rl_megatron.runtime.build import make_layout

TEXTS = (
    "The capital of France is Paris.",
    "def add(a, b):\n    return a + b\n",
    "If 3x + 7 = 22, then x = 5, because 22 - 7 = 15 and 15 / 3 = 5.",
    "Ünïcödé, 漢字 and 🙂.",
)
VOCAB_DIVISOR = 128


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if the logits agree, 1 if not, 2 after a mistake."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("settings", nargs="*", metavar="setting=value")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="largest difference allowed")
    options = parser.parse_args(arguments)
    log.silence_megatron_warnings()
    log.setup_logging(int(os.environ.get("RANK", "0")))
    try:
        parallel = parse_parallel(options.settings)
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        check_world_size(parallel, world_size)
        process = start_megatron(make_layout(parallel, world_size), seed=0)
        difference = worst_difference(options.folder, process)
    except RLMegatronError as error:
        print(f"check_logits: {error}", file=sys.stderr)
        return 2
    if process.is_main:
        verdict = "agree" if difference <= options.tolerance else "DIFFER"
        what = (
            "scores"
            if read_shape(resolve_model_folder(options.folder).hf).scalar_head
            else "logits"
        )
        print(f"{process.layout.describe()}: {what} {verdict}, max abs difference {difference:.3g}")
    stop()
    return int(difference > options.tolerance)


def worst_difference(folder: Path, process: Process) -> float:
    """Largest absolute difference of the logits, or scores, of TEXTS, on all ranks."""
    # Importing Megatron takes seconds; mistakes are found before.
    from rl_megatron.backends.megatron import MegatronBackend
    from rl_megatron.checkpoint.hf_load import load_hf_weights
    from rl_megatron.models.gpt import build_model
    from rl_megatron.rollout.megatron import MegatronEngine

    source = resolve_model_folder(folder).hf
    tokenizer = load_tokenizer(source)
    texts = [tokenizer.encode(text) for text in TEXTS]
    shape = read_shape(source)
    chunks = build_model(shape, process, torch.float32, VOCAB_DIVISOR)
    rules = weight_rules(shape, VOCAB_DIVISOR)
    load_hf_weights(chunks, rules, source, process)
    if shape.scalar_head:
        examples = [Example(row, (), tuple(ids)) for row, ids in enumerate(texts)]
        micro_batching = MicroBatching(micro_batch_size=len(texts))
        backend = MegatronBackend(chunks, rules, process, micro_batching)
        found = backend.scores(pack_sft(examples)).to(process.device)
    else:
        found = MegatronEngine(chunks, process, str, max_concurrent_sequences=1).logits(texts)
    worst = torch.zeros(1)
    if process.is_main:
        model = load_transformers_model(source, torch.float32, process.device).eval()
        # Each text alone: it ends at its last token, whatever stands there.
        model.config.pad_token_id = None
        with torch.inference_mode():
            rows = [model(torch.tensor([ids], device=process.device)).logits[0] for ids in texts]
        worst = (torch.cat(rows) - found).abs().max().cpu()[None]
    return float(process.all_reduce(worst, op=dist.ReduceOp.MAX))


if __name__ == "__main__":
    raise SystemExit(main())
