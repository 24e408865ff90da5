"""Supervised fine-tuning: make given responses more likely."""

from __future__ import annotations

from rl_megatron.config import SFTRun, parse_command_line

if __name__ == "__main__":
    # Before torch is imported: --help, --print-config and mistakes are answered at once.
    RUN = parse_command_line(SFTRun, __doc__ or "")

from rl_megatron.interfaces import metric_names as names
from rl_megatron.losses import sft_objective
from rl_megatron.runtime.evaluation import held_out_metrics
from rl_megatron.runtime.job import Job
from rl_megatron.runtime.launch import launch
from rl_megatron.runtime.learning_rate import learning_rate
from rl_megatron.runtime.tasks import build_sft

SHOWN = {"loss": names.LOSS_NLL, "gradient": names.OPTIMIZER_GRAD_NORM}


def train(run: SFTRun) -> None:
    """Token-mean negative log-likelihood of the responses, one mini-batch per optimiser step."""
    with Job.start(run, "sft", SHOWN) as job:
        task = build_sft(run, job.process)
        objective = sft_objective()
        num_steps = task.batches.num_steps
        job.resume(task.policy, data=task.batches.cursor)

        for step in job.rounds(num_steps):
            batch = task.batches.next()
            with job.phase("update") as span:
                rate = learning_rate(run.optimizer, step, num_steps)
                metrics = task.policy.train_step(batch, objective, rate)
                span.tokens = batch.num_tokens
            job.record(step, metrics)

            if job.is_due(run.train.eval_interval):
                with job.phase("evaluate"):
                    held_out = task.batches.held_out
                    results = task.evaluate()
                    results |= held_out_metrics(task.policy, None, objective, held_out)
                job.record_evaluation(step, results)


if __name__ == "__main__":
    launch(train, RUN)
