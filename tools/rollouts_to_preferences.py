"""Makes preference pairs of the rollouts of a GRPO run: the best of each group against the worst.

    python tools/rollouts_to_preferences.py RUN [--output FILE] [--min-margin 0.5] [--since STEP]

RUN is the run folder. It must have kept its rollouts: set logging.rollouts_per_step=null (all of
them) in the run. Prompts are those of the run's data, untouched (text or messages), so that a DPO
run with the same tokenizer and chat template sees them as the rollouts did. Groups with rewards
less than --min-margin apart, responses that were cut, and repeated pairs give nothing. --since
leaves out rollouts of early steps, which a weaker policy made. Exits with 2 after a mistake.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_megatron.checkpoint.publish import durable_file
from rl_megatron.config import GRPORun, load_run
from rl_megatron.data.rollout_pairs import PairCounts, RolloutPair, make_rollout_pairs
from rl_megatron.data.sources import Row, read_rows
from rl_megatron.errors import DataError, RLMegatronError
from rl_megatron.metrics.rollouts import ROLLOUTS_FILE
from rl_megatron.runtime.job import CONFIG_FILE


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when the file is written, 2 after a mistake, which is then on stderr."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder of GRPO")
    parser.add_argument("--output", type=Path, help="default: RUN/preferences.jsonl")
    parser.add_argument("--min-margin", type=float, default=0.5, help="between rewards (0.5)")
    parser.add_argument("--since", type=int, default=0, help="first step whose rollouts count")
    parser.add_argument("--keep-truncated", action="store_true", help="use cut responses too")
    options = parser.parse_args(arguments)
    if options.min_margin <= 0:
        parser.error(f"--min-margin {options.min_margin:g}: must be above 0")
    try:
        pairs, counts = _make(options)
    except RLMegatronError as error:
        print(f"rollouts_to_preferences: {error}", file=sys.stderr)
        return 2
    for reason, number in counts.skipped.items():
        print(f"skipped {number:,} groups: {reason}")
    output = options.output or options.run / "preferences.jsonl"
    print(f"wrote {len(pairs):,} pairs of {sum(counts.groups.values()):,} groups to {output}")
    return 0


def _make(options: argparse.Namespace) -> tuple[list[RolloutPair], PairCounts]:
    run = load_run(GRPORun, options.run / CONFIG_FILE)
    rollouts = [row for row in _read(options.run / ROLLOUTS_FILE) if row["step"] >= options.since]
    pairs, counts = make_rollout_pairs(rollouts, options.min_margin, options.keep_truncated)
    whole = run.rollout.group_size
    if counts.groups and max(counts.groups) < whole:
        raise DataError(
            f"{options.run / ROLLOUTS_FILE} holds {max(counts.groups)} of the {whole} rollouts of "
            f"a group at most: logging.rollouts_per_step was {run.logging.rollouts_per_step}. Set "
            "it to null, which keeps all of them, and run again."
        )
    if not pairs:
        why = "; ".join(f"{number}: {reason}" for reason, number in counts.skipped.items())
        raise DataError(
            f"{options.run / ROLLOUTS_FILE} gives no pair ({why or 'it is empty'}). Lower "
            "--min-margin or --since, or sample larger groups."
        )
    prompts = read_rows(run.data.train, "data.train")
    output = options.output or options.run / "preferences.jsonl"
    with durable_file(output) as aside:
        lines = (json.dumps(_row(pair, prompts, run)) + "\n" for pair in pairs)
        aside.write_text("".join(lines), encoding="utf-8")
    return pairs, counts


def _row(pair: RolloutPair, prompts: Sequence[Row], run: GRPORun) -> dict[str, Any]:
    """A row of preference data, in the form of its prompt: text, or messages."""
    if pair.row_id >= len(prompts):
        raise DataError(
            f"a rollout answers row {pair.row_id} of {run.data.train.path}, which has "
            f"{len(prompts)}. The data is not that of the run any more."
        )
    prompt = prompts[pair.row_id].require(run.data.train.prompt_key, "data.train.prompt_key")
    sides: dict[str, Any] = {"chosen": pair.chosen, "rejected": pair.rejected}
    if not isinstance(prompt, str):
        sides = {name: [{"role": "assistant", "content": text}] for name, text in sides.items()}
    return {"prompt": prompt, **sides, "margin": pair.margin, "step": pair.step}


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]
    except FileNotFoundError as error:
        raise DataError(
            f"{path} is missing: the run kept no rollouts. Set logging.rollouts_per_step=null."
        ) from error
    except json.JSONDecodeError as error:
        raise DataError(f"{path} is broken: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
