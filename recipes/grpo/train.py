"""Group relative policy optimisation: learn from rewards of the policy's own responses."""

from __future__ import annotations

from rl_megatron.config import GRPORun, parse_command_line

if __name__ == "__main__":
    # Before torch is imported: --help, --print-config and mistakes are answered at once.
    RUN = parse_command_line(GRPORun, __doc__ or "")

from rl_megatron.advantages import compute_advantages, with_advantages
from rl_megatron.data.packing import pack_rollouts
from rl_megatron.interfaces import metric_names as names
from rl_megatron.losses import correct_for_rollout, grpo_objective, rollout_mismatch
from rl_megatron.runtime.guards import check_first_grpo_step
from rl_megatron.runtime.job import Job
from rl_megatron.runtime.kl_in_reward import KLInReward
from rl_megatron.runtime.launch import launch
from rl_megatron.runtime.learning_rate import learning_rate
from rl_megatron.runtime.rollout_batch import (
    mask_truncated,
    mean_metrics,
    mini_batches,
    num_response_tokens,
    rollout_metrics,
)
from rl_megatron.runtime.tasks import build_grpo

SHOWN = {
    "reward": names.REWARD_MEAN,
    "loss": names.LOSS_POLICY,
    "kl": names.POLICY_KL_TO_REFERENCE,
    "entropy": names.POLICY_ENTROPY,
    "tokens": names.ROLLOUT_RESPONSE_TOKENS,
}


def train(run: GRPORun) -> None:
    """Sample groups of responses, score them, and raise the log-probs of the better ones."""
    with Job.start(run, "grpo", SHOWN) as job:
        task = build_grpo(run, job.process)
        policy, reference, algorithm = task.policy, task.reference, run.algorithm
        objective = grpo_objective(
            **run.loss.model_dump(),
            max_response_tokens=run.rollout.max_response_tokens,
            implementation=run.kernels.losses,
        )
        kl_in_reward = KLInReward(algorithm)
        step = job.resume(policy, prompts=task.groups.cursor, kl_in_reward=kl_in_reward)

        for number in job.rounds(run.train.num_rollout_batches):
            sampled = task.groups.sample(number, job.phase, policy_version=step)
            rollouts, scores = sampled.rollouts, sampled.scores
            job.record_rollouts(step + 1, rollouts, scores.rewards)

            batch = pack_rollouts(rollouts, task.sampling.stop_token_ids)
            with job.phase("old_logprobs") as span:
                batch = batch.with_fields(old_logprobs=policy.logprobs(batch))
                span.tokens = batch.num_tokens
            if reference is not None:
                with job.phase("ref_logprobs") as span:
                    batch = batch.with_fields(ref_logprobs=reference.logprobs(batch))
                    span.tokens = batch.num_tokens

            mismatch = rollout_mismatch(
                batch.old_logprobs, batch.rollout_logprobs, batch.response_mask
            )
            rewards, kl_metrics = kl_in_reward.apply(scores.rewards, batch)
            batch, masked = mask_truncated(batch, rollouts, algorithm.mask_truncated_responses)
            advantages = compute_advantages(
                rewards,
                sampled.group_ids,
                run.rollout.group_size,
                adv_estimator=algorithm.adv_estimator,
                adv_eps=algorithm.adv_eps,
                adv_clip=algorithm.adv_clip,
                num_tokens=num_response_tokens(batch),
            )
            batch, importance = correct_for_rollout(
                with_advantages(batch, advantages),
                rollout_is=algorithm.rollout_is,
                rollout_is_level=algorithm.rollout_is_level,
                rollout_is_threshold=algorithm.rollout_is_threshold,
            )

            updates = []
            with job.phase("update") as span:
                for epoch in range(run.train.ppo_epochs):
                    key = (run.seed, number, epoch)
                    for mini_batch in mini_batches(batch, run.mini_batch_size, key):
                        step += 1
                        rate = learning_rate(run.optimizer, step, run.num_steps)
                        updates.append(policy.train_step(mini_batch, objective, rate))
                        span.tokens += mini_batch.num_tokens
                        if step == 1:
                            check_first_grpo_step(run, updates[0])
            metrics = mean_metrics(updates) | rollout_metrics(rollouts, scores, advantages)
            metrics |= sampled.metrics | masked | mismatch | importance | kl_metrics
            job.record(step, metrics)

            if job.is_due(run.train.eval_interval):
                with job.phase("evaluate"):
                    results = task.evaluate()
                job.record_evaluation(step, results)


if __name__ == "__main__":
    launch(train, RUN)
