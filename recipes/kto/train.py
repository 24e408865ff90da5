"""Kahneman-Tversky optimisation: more of desirable responses, less of undesirable ones."""

from __future__ import annotations

from rl_megatron.config import KTORun, parse_command_line

if __name__ == "__main__":
    # Before torch is imported: --help, --print-config and mistakes are answered at once.
    RUN = parse_command_line(KTORun, __doc__ or "")

from functools import partial

from rl_megatron.errors import NumericsError
from rl_megatron.interfaces import metric_names as names
from rl_megatron.losses import kto_objective
from rl_megatron.runtime.evaluation import held_out_kto_metrics, mismatch_kl
from rl_megatron.runtime.guards import check_first_kto_step
from rl_megatron.runtime.job import Job
from rl_megatron.runtime.launch import launch
from rl_megatron.runtime.learning_rate import learning_rate
from rl_megatron.runtime.tasks import build_kto

SHOWN = {"loss": names.LOSS_KTO, "margin": names.REWARDS_MARGINS, "kl": names.KL}


def train(run: KTORun) -> None:
    """1 - sigmoid(+-(beta * log-ratio - beta * KL)), + for desirable responses."""
    with Job.start(run, "kto", SHOWN) as job:
        task = build_kto(run, job.process)
        policy, reference, batches = task.policy, task.reference, task.batches
        objective_at = partial(kto_objective, **run.loss.model_dump())
        num_steps = batches.num_steps
        job.resume(policy, data=batches.cursor, drift=task.drift)

        for step in job.rounds(num_steps):
            batch = batches.next()
            with job.phase("ref_logprobs") as span:
                rows = batch.rows.with_fields(ref_logprobs=reference.logprobs(batch.rows))
                span.tokens = rows.num_tokens
            # Of the whole mini-batch and before the step, so that no split of it takes part.
            with job.phase("kl"):
                kl = mismatch_kl(policy, reference, batch)
            with job.phase("update") as span:
                rate = learning_rate(run.optimizer, step, num_steps)
                metrics = policy.train_step(rows, objective_at(kl=kl), rate) | {names.KL: kl}
                span.tokens = rows.num_tokens
            if step == 1:
                check_first_kto_step(run, metrics)
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
                    results |= held_out_kto_metrics(
                        policy, reference, lambda kl: objective_at(kl=kl), batches.held_out
                    )
                job.record_evaluation(step, results)


if __name__ == "__main__":
    launch(train, RUN)
