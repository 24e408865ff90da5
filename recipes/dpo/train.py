"""Direct preference optimisation: prefer chosen responses to rejected ones."""

from __future__ import annotations

from rl_megatron.config import DPORun, parse_command_line

if __name__ == "__main__":
    # Before torch is imported: --help, --print-config and mistakes are answered at once.
    RUN = parse_command_line(DPORun, __doc__ or "")

from rl_megatron.errors import NumericsError
from rl_megatron.interfaces import metric_names as names
from rl_megatron.losses import dpo_objective
from rl_megatron.runtime.evaluation import held_out_metrics
from rl_megatron.runtime.guards import check_first_dpo_step
from rl_megatron.runtime.job import Job
from rl_megatron.runtime.launch import launch
from rl_megatron.runtime.learning_rate import learning_rate
from rl_megatron.runtime.tasks import build_dpo

SHOWN = {
    "loss": names.LOSS_DPO,
    "margin": names.REWARDS_MARGINS,
    "accuracy": names.REWARDS_ACCURACIES,
}


def train(run: DPORun) -> None:
    """-logsigmoid(beta * (log-ratio of chosen - log-ratio of rejected)), or another pair loss."""
    with Job.start(run, "dpo", SHOWN) as job:
        task = build_dpo(run, job.process)
        policy, reference, batches = task.policy, task.reference, task.batches
        objective = dpo_objective(**run.loss.model_dump(), implementation=run.kernels.losses)
        num_steps = batches.num_steps
        job.resume(policy, data=batches.cursor, drift=task.drift)

        for step in job.rounds(num_steps):
            batch = batches.next()
            if reference is not None:
                with job.phase("ref_logprobs") as span:
                    batch = batch.with_fields(ref_logprobs=reference.logprobs(batch))
                    span.tokens = batch.num_tokens
            with job.phase("update") as span:
                rate = learning_rate(run.optimizer, step, num_steps)
                metrics = policy.train_step(batch, objective, rate)
                span.tokens = batch.num_tokens
            if step == 1:
                check_first_dpo_step(run, metrics)
            job.record(step, metrics)

            if task.drift is not None and job.is_due(run.drift.kl_snapshot_interval):
                with job.phase("kl_snapshot"):
                    results, stop = task.drift.measure(step)
                job.record_evaluation(step, results)
                if stop:
                    job.save()
                    raise NumericsError(f"drift.stop_on_growth: the run ends after step {step}")
            if job.is_due(run.train.eval_interval):
                with job.phase("evaluate"):
                    results = task.evaluate()
                    results |= held_out_metrics(policy, reference, objective, batches.held_out)
                job.record_evaluation(step, results)


if __name__ == "__main__":
    launch(train, RUN)
