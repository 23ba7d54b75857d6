"""What a config may say but hardly means: one clear sentence each."""

from fgrpo_jax.batches import minibatch_rows, updates_a_step
from fgrpo_jax.validation import Config, keys

ONLY_WITH = {  # key -> the key and the values with which it is read
    "algo.tau_right": ("algo.name", ["sapo"]),
    "algo.tau_wrong": ("algo.name", ["sapo"]),
    "algo.pass_k": ("algo.advantage", ["pkpo"]),
    "algo.smooth_right": ("algo.advantage", ["ds_grpo"]),
    "algo.smooth_wrong": ("algo.advantage", ["ds_grpo"]),
    "algo.domain_weight": ("algo.advantage", ["disco"]),
    "algo.lambda_ratio": ("algo.aggregator", ["lambda_grpo"]),
    "algo.lambda_lr": ("algo.aggregator", ["lambda_grpo"]),
    "importance.level": ("importance.kind", ["truncate", "mask"]),
    "importance.high": ("importance.kind", ["truncate", "mask"]),
    "importance.low": ("importance.kind", ["mask"]),
    "rollout.attempts": ("rollout.dynamic", [True]),
    "rollout.cache_gib": ("rollout.slots", [0]),
}


def warnings(c: Config, default: Config) -> list[str]:
    """Sentences on what a validated config can do and hardly means to."""
    flat, plain = keys(c), keys(default)
    updates, wide = updates_a_step(c), max(c.algo.clip_low, c.algo.clip_high)
    found = {
        f"{key} is {flat[key]} and nothing reads it: {other} is {flat[other]}": (
            flat[key] != plain[key] and flat[other] not in values
        )
        for key, (other, values) in ONLY_WITH.items()
    }
    found |= {
        f"the learning rate is 0 from rollout step {c.optim.decay_end} (optim.decay_end) to "
        f"{c.steps}, the run's last": 0 < c.optim.decay_end < c.steps,
        f"{c.algo.name} bounds the ratio of a whole sequence, and {wide:g} is a bound for single "
        "tokens: it will hardly ever clip; the paper has 3e-4 and 4e-4": (
            c.algo.name.startswith("gspo") and wide > 0.05
        ),
        "kl.estimator k1 in the loss has a gradient of mean 0: take k2, k3 or k1+": (
            c.kl.coef > 0 and c.kl.place == "loss" and c.kl.estimator == "k1"
        ),
        "score.overlong_buffer lowers the reward of long samples whose loss algo.truncated takes "
        "out where they are longest": c.score.overlong_buffer > 0 and c.algo.truncated != "keep",
        f"{c.algo.name} never clips here: with one optimizer update a step all ratios are 1": (
            updates == 1 and c.algo.name in ("gspo", "gspo_token", "gmpo")
        ),
        f"learn.widths is {c.learn.widths} and a minibatch is one microbatch, whose rows all take "
        "the longest one's width: lower learn.microbatch": (
            c.learn.widths > 1 and c.learn.microbatch >= minibatch_rows(c)
        ),
        f"reinforce corrects for no ratio, and {updates} optimizer updates a step leave the policy "
        "that sampled": updates > 1 and c.algo.name == "reinforce",
        f"rollout.subset is all {c.algo.group_size} samples of a group: nothing is chosen": (
            c.rollout.subset == c.algo.group_size
        ),
        f"eval.temperature is 0: all {c.eval.samples} samples of a problem are the same": (
            c.eval.temperature == 0 and c.eval.samples > 1
        ),
        "rollout.top_k, top_p or min_p cut the distribution that is sampled from, and the policy's "
        "is trained: importance.kind can weigh the difference": (
            c.importance.kind == "none"
            and (c.rollout.top_k > 0 or c.rollout.top_p < 1 or c.rollout.min_p > 0)
        ),
        "score.coin pays whatever the answers are, and algo.focal_gamma, rollout.dynamic, "
        "score.unlikeliness and ds_grpo read the answers": c.score.coin > 0
        and (
            c.algo.focal_gamma > 0
            or c.rollout.dynamic
            or c.score.unlikeliness > 0
            or c.algo.advantage == "ds_grpo"
        ),
        "rollout.dynamic drops the groups without a right answer, which ngrpo is to learn from": (
            c.rollout.dynamic and c.algo.advantage == "ngrpo"
        ),
    }
    return [sentence for sentence, holds in found.items() if holds]
