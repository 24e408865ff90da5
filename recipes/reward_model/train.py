"""Reward model: give chosen responses a higher score than rejected ones."""

from __future__ import annotations

from rl_megatron.config import RewardModelRun, parse_command_line

if __name__ == "__main__":
    # Before torch is imported: --help, --print-config and mistakes are answered at once.
    RUN = parse_command_line(RewardModelRun, __doc__ or "")

from rl_megatron.interfaces import metric_names as names
from rl_megatron.losses import reward_model_objective
from rl_megatron.runtime.evaluation import reward_metrics
from rl_megatron.runtime.job import Job
from rl_megatron.runtime.launch import launch
from rl_megatron.runtime.learning_rate import learning_rate
from rl_megatron.runtime.tasks import build_reward_task

SHOWN = {
    "loss": names.LOSS_REWARD_MODEL,
    "margin": names.REWARDS_MARGINS,
    "accuracy": names.REWARDS_ACCURACIES,
}


def train(run: RewardModelRun) -> None:
    """-logsigmoid(score of chosen - score of rejected - margin), a mean over pairs."""
    with Job.start(run, "reward_model", SHOWN) as job:
        task = build_reward_task(run, job.process)
        objective = reward_model_objective(**run.loss.model_dump())
        num_steps = task.batches.num_steps
        job.resume(task.model, data=task.batches.cursor)

        for step in job.rounds(num_steps):
            batch = task.batches.next()
            with job.phase("update") as span:
                rate = learning_rate(run.optimizer, step, num_steps)
                metrics = task.model.train_step(batch, objective, rate)
                span.tokens = batch.num_tokens
            job.record(step, metrics)

            if job.is_due(run.train.eval_interval):
                with job.phase("evaluate"):
                    results = reward_metrics(task.model, objective, task.batches.held_out)
                job.record_evaluation(step, results)


if __name__ == "__main__":
    launch(train, RUN)
