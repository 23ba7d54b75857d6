"""What the keys of a config may hold, and what the methods' papers have there."""

from typing import NamedTuple


class Published(NamedTuple):
    """A surrogate as its paper has it."""

    surrogate: str  # objective.surrogate_loss's name
    clip_low: float
    clip_high: float
    dual_clip: float  # 0: none
    aggregator: str


ALGORITHMS = {  # by algo.name
    "grpo": Published("ppo_clip", 0.2, 0.2, 3.0, "token_mean"),
    "dapo": Published("ppo_clip", 0.2, 0.28, 3.0, "token_mean"),  # clip-higher
    "cispo": Published("cispo", 1.0, 5.0, 0.0, "token_mean"),  # ScaleRL's: weights in [0, 6]
    "gspo": Published("gspo", 3e-4, 4e-4, 0.0, "sequence_mean_token_mean"),
    "gspo_token": Published("gspo_token", 3e-4, 4e-4, 0.0, "sequence_mean_token_mean"),
    "gmpo": Published("gmpo", 0.4, 0.4, 0.0, "sequence_mean_token_mean"),
    "sapo": Published("sapo", 0.0, 0.0, 0.0, "sequence_mean_token_mean"),
    "reinforce": Published("reinforce", 0.0, 0.0, 0.0, "token_mean"),
}
AGGREGATORS = (
    "token_mean sequence_mean_token_mean sequence_mean_token_sum constant_length lambda_grpo"
).split()
ADVANTAGES = (
    "grpo mean_only batch_std rloo leave_one_out opo reinforce_plus_plus_baseline maxrl pkpo "
    "grpo_passk ngrpo ds_grpo disco"
).split()
CHOICES = {
    "model.dtype": "auto float32 bfloat16".split(),
    "model.attention": "auto xla splash cudnn".split(),
    "model.remat": "none dots attention full".split(),
    "lora.export": "merged adapter".split(),
    "mesh.sequence": "auto yes no".split(),
    "algo.name": list(ALGORITHMS),
    "algo.aggregator": AGGREGATORS,
    "algo.advantage": ADVANTAGES,
    "algo.domain_weight": "log log_squared inverse".split(),
    "algo.truncated": "keep mask drop".split(),
    "kl.place": "loss reward".split(),
    "kl.estimator": "k1 k2 k3 abs k1+ k3+".split(),
    "importance.kind": "none truncate mask".split(),
    "importance.level": "token sequence".split(),
    "rollout.unroll": "auto yes no".split(),
    "optim.first_moment": "float32 bfloat16".split(),
    "guard.on_not_finite": "skip end".split(),
    "guard.on_spike": "skip end".split(),
    "guard.on_drift": "warn skip end".split(),
    "guard.on_recompile": "warn end".split(),
}
TARGETS = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split()  # of adapters
POSITIVE = (
    "steps lora.alpha rollout.prompts rollout.max_response rollout.chunk rollout.temperature "
    "rollout.attempts rollout.cache_gib rollout.prefill rollout.max_drift rollout.top_p "
    "learn.minibatch learn.microbatch learn.widths learn.epochs learn.logit_chunk algo.pass_k "
    "algo.tau_right algo.tau_wrong data.max_prompt score.workers score.timeout checkpoint.every "
    "checkpoint.keep eval.samples eval.problems eval.top_p optim.lr optim.clip_norm mesh.replica "
    "mesh.tp sft.steps sft.rows sft.rope_theta importance.high guard.skips"
).split()
NOT_NEGATIVE = (
    "seed lora.rank algo.focal_gamma algo.clip_low algo.clip_high algo.dual_clip algo.std_eps "
    "algo.smooth_right algo.smooth_wrong algo.lambda_ratio algo.lambda_lr algo.entropy_coef "
    "kl.coef importance.low score.overlong_buffer score.overlong_factor score.unlikeliness "
    "score.coin learn.pack rollout.subset rollout.slots rollout.waiting rollout.top_k "
    "rollout.min_p optim.warmup optim.decay_start optim.weight_decay eval.every eval.temperature "
    "eval.top_k eval.min_p sft.slips watchdog.lag watchdog.stall guard.spike guard.constant "
    "guard.keep"
).split()
AT_MOST_1 = "rollout.top_p rollout.min_p eval.top_p eval.min_p score.unlikeliness".split()
