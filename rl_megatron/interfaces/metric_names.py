"""Names of metrics, as `group/name`, in one place for those who write them and those who read them.

A mean "per token" is over the tokens under the response mask of the whole mini-batch, "per pair"
over its valid pairs. Log-probs, entropies and KL divergences are in nats.
"""

# The loss that is minimised; the terms are without their coefficients.
LOSS_TOTAL = "loss/total"
LOSS_POLICY = "loss/policy"
LOSS_KL = "loss/kl"
LOSS_ENTROPY = "loss/entropy"
LOSS_DPO = "loss/dpo"
LOSS_NLL = "loss/nll"
LOSS_REWARD_MODEL = "loss/reward_model"
LOSS_CENTERING = "loss/centering"
LOSS_KTO = "loss/kto"
# Balance over experts, summed over layers: their number where every sequence gives all the same.
LOSS_MOE_BALANCE = "loss/moe_balance"

# The policy now against the policy at the start of the step, per token. The ratio is the one that
# the loss is made of: in mode gspo that of the whole response, on each of its tokens.
POLICY_CLIP_FRACTION_LOW = "policy/clip_fraction_low"
POLICY_CLIP_FRACTION_HIGH = "policy/clip_fraction_high"
POLICY_CLIP_FRACTION_DUAL = "policy/clip_fraction_dual"
POLICY_RATIO_MEAN = "policy/ratio_mean"
POLICY_RATIO_MAX = "policy/ratio_max"
POLICY_APPROX_KL = "policy/approx_kl"
POLICY_ENTROPY = "policy/entropy"
POLICY_KL_TO_REFERENCE = "policy/kl_to_reference"

# The engine's log-probs against the trainer's, of the same weights.
ROLLOUT_MISMATCH_KL = "rollout/mismatch_kl"
ROLLOUT_MISMATCH_MAX_ABS = "rollout/mismatch_max_abs"

# Weights that make up for it, before any bound; over tokens or, at level sequence, over responses.
# Share of them that is bounded or masked, and (sum w)^2 / (n * sum w^2) of what is then used.
ROLLOUT_IS_MEAN = "rollout/is_weight_mean"
ROLLOUT_IS_MAX = "rollout/is_weight_max"
ROLLOUT_IS_BOUNDED = "rollout/is_bounded_fraction"
ROLLOUT_IS_EFFECTIVE = "rollout/is_effective_sample_fraction"

# Rewards of a pair's responses, implicit ones in DPO, under TRL's names; per pair. Log-probs of
# responses in DPO.
REWARDS_CHOSEN = "rewards/chosen"
REWARDS_REJECTED = "rewards/rejected"
REWARDS_MARGINS = "rewards/margins"
REWARDS_ACCURACIES = "rewards/accuracies"
LOGPS_CHOSEN = "logps/chosen"
LOGPS_REJECTED = "logps/rejected"

# Of a reward model over all held-out responses, chosen and rejected.
REWARDS_MEAN = "rewards/mean"
REWARDS_STD = "rewards/std"

# KTO: the KL that rewards are measured from, per response. Its rewards and log-probs are per
# desirable (chosen) and per undesirable (rejected) response.
KL = "kl"

# The rewards of a rollout batch, over the rollouts that were scored. `reward/<name>` is the mean of
# each reward by itself.
REWARD_MEAN = "reward/mean"
REWARD_STD = "reward/std"

# With the KL in the reward: mean KL of a response, summed over its tokens, and its coefficient.
REWARD_KL = "reward/kl"
REWARD_KL_COEF = "reward/kl_coef"

# Rollouts: tokens per response, share that was cut, number that no reward could score, and share
# of the groups whose rewards are all equal.
ROLLOUT_RESPONSE_TOKENS = "rollout/response_tokens_mean"
ROLLOUT_TRUNCATED = "rollout/truncated_fraction"
ROLLOUT_UNSCORED = "rollout/unscored"
ROLLOUT_ZERO_VARIANCE = "rollout/zero_variance_fraction"

# Responses that are not trained on because they were cut.
ROLLOUT_MASKED = "rollout/masked_responses"

# Dynamic sampling: how often further prompts were drawn, groups that were replaced, and the mean
# reward of all that was sampled, replaced groups included.
ROLLOUT_REFILLS = "rollout/refills"
ROLLOUT_REPLACED = "rollout/replaced_groups"
ROLLOUT_DRAWN_REWARD = "rollout/drawn_reward_mean"

# The optimizer. `skipped` is 1 where no token of the mini-batch counted and no update was made.
OPTIMIZER_GRAD_NORM = "optimizer/grad_norm"
OPTIMIZER_LR = "optimizer/lr"
OPTIMIZER_SKIPPED = "optimizer/skipped"

# KL of policy and reference on responses to held-out prompts: of a response, per token, and whether
# it has grown too much (1) or not (0).
DRIFT_KL = "drift/kl"
DRIFT_KL_PER_TOKEN = "drift/kl_per_token"
DRIFT_ALARM = "drift/alarm"

# Held-out prompts: mean reward of greedy and of sampled answers.
EVALUATION_GREEDY = "evaluation/greedy_reward"
EVALUATION_SAMPLED = "evaluation/sampled_reward"
