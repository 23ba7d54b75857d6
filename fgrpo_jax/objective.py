"""The loss of an update, put together from parts named in the config."""

import dataclasses

import jax.numpy as jnp
from jax.lax import stop_gradient
from jaxtyping import Array

from fgrpo_jax import aggregators, kl, losses
from fgrpo_jax.choices import ALGORITHMS
from fgrpo_jax.structs import LearnerBatch
from fgrpo_jax.validation import Config


@dataclasses.dataclass(frozen=True)
class Objective:
    """What is static in the loss; fields as the config's."""

    surrogate: str  # as in surrogate_loss
    clip_low: float = 0.0
    clip_high: float = 0.0
    dual_clip: float = 0.0  # 0: none
    tau_right: float = 1.0  # SAPO's temperatures
    tau_wrong: float = 1.05
    aggregator: str = "token_mean"  # as in aggregate
    constant_length: int = 1  # tokens, of the aggregator of that name
    lambda_ratio: float = 1 / 9  # r of lambda-GRPO
    lambda_lr: float = 0.0  # of its exponent, by plain gradient descent
    entropy_coef: float = 0.0
    kl_coef: float = 0.0  # of the loss; 0: no reference
    kl_estimator: str = "k3"
    importance: str = "none"  # sampler against trainer: none, truncate, mask
    importance_level: str = "token"  # or sequence
    importance_low: float = 0.0
    importance_high: float = 2.0


def make_objective(c: Config) -> Objective:
    """The config's."""
    return Objective(
        surrogate=ALGORITHMS[c.algo.name].surrogate,
        clip_low=c.algo.clip_low,
        clip_high=c.algo.clip_high,
        dual_clip=c.algo.dual_clip,
        tau_right=c.algo.tau_right,
        tau_wrong=c.algo.tau_wrong,
        aggregator=c.algo.aggregator,
        constant_length=c.rollout.max_response,
        lambda_ratio=c.algo.lambda_ratio,
        lambda_lr=c.algo.lambda_lr,
        entropy_coef=c.algo.entropy_coef,
        kl_coef=c.kl.coef if c.kl.place == "loss" else 0.0,
        kl_estimator=c.kl.estimator,
        importance=c.importance.kind,
        importance_level=c.importance.level,
        importance_low=c.importance.low,
        importance_high=c.importance.high,
    )


def surrogate_loss(
    o: Objective, logp_BT: Array, old_logp_BT: Array, advantage_B1: Array, mask_BT: Array
) -> Array:
    """[B, T], by the surrogate's name."""
    rows = (logp_BT, old_logp_BT, advantage_B1)
    match o.surrogate:
        case "ppo_clip":
            return losses.ppo_clip(*rows, o.clip_low, o.clip_high, o.dual_clip)
        case "cispo":
            return losses.cispo(*rows, o.clip_low, o.clip_high)
        case "gspo":
            return losses.gspo(*rows, mask_BT, o.clip_low, o.clip_high)
        case "gspo_token":
            return losses.gspo_token(*rows, mask_BT, o.clip_low, o.clip_high)
        case "gmpo":
            return losses.gmpo(*rows, mask_BT, o.clip_low, o.clip_high)
        case "sapo":
            return losses.sapo(*rows, o.tau_right, o.tau_wrong)
        case "reinforce":
            return losses.policy_gradient(logp_BT, advantage_B1)
    raise ValueError(f"no surrogate {o.surrogate!r}")


def clipped(
    o: Objective, logp_BT: Array, old_logp_BT: Array, advantage_B1: Array, mask_BT: Array
) -> Array:
    """[B, T], where the clip took the gradient away (CISPO: where it bounds the weight)."""
    low, high = o.clip_low, o.clip_high
    ratio_BT = losses.importance_ratio(logp_BT, old_logp_BT)
    match o.surrogate:
        case "ppo_clip":
            return losses.is_clipped(ratio_BT, advantage_B1, low, high)
        case "cispo":  # whatever the advantage's sign
            return (ratio_BT < 1 - low) | (ratio_BT > 1 + high)
        case "gspo" | "gspo_token":
            ratio_B1 = losses.sequence_ratio(logp_BT, old_logp_BT, mask_BT)
            clipped_B1 = losses.is_clipped(ratio_B1, advantage_B1, low, high)
            return jnp.broadcast_to(clipped_B1, mask_BT.shape)
        case "gmpo":  # its bounds are the logarithm's
            return losses.is_clipped(1 + jnp.log(ratio_BT), advantage_B1, low, high)
    return jnp.zeros(mask_BT.shape, bool)


def drift_weight(
    o: Objective, old_logp_BT: Array, drawn_logp_BT: Array, mask_BT: Array
) -> Array | None:
    """[B, T], what multiplies the surrogate where sampler and trainer differ, or None."""
    rows = (old_logp_BT, drawn_logp_BT, mask_BT, o.importance_level)
    match o.importance:
        case "truncate":
            return losses.truncated_importance_weight(*rows, o.importance_high)
        case "mask":
            return losses.masked_importance_weight(*rows, o.importance_low, o.importance_high)
    return None


def token_loss(
    o: Objective,
    logp_BT: Array,
    entropy_BT: Array,
    old_logp_BT: Array,
    rows: LearnerBatch,
    exponent: Array,
) -> tuple[Array, dict[str, Array]]:
    """The whole loss [B, T], and sums over its tokens to report.

    surrogate * drift weight + kl_coef * KL - entropy_coef * entropy, and all that times
    lambda-GRPO's weight of the row, whose exponent is trained.
    """
    mask_BT, advantage_B1 = rows.mask_BT, rows.advantage_B[:, None]
    loss_BT = surrogate_loss(o, logp_BT, old_logp_BT, advantage_B1, mask_BT)
    clipped_BT = clipped(o, logp_BT, old_logp_BT, advantage_B1, mask_BT)
    report = {
        "entropy": entropy_BT,
        "clip_fraction": clipped_BT.astype(jnp.float32),
        "approx_kl": old_logp_BT - logp_BT,
    }
    drawn_logp_BT = rows.drawn_logp_BT  # truncation of the distribution is drift too
    drawn_logp_BT = rows.sampler_logp_BT if drawn_logp_BT is None else drawn_logp_BT
    weight_BT = drift_weight(o, old_logp_BT, drawn_logp_BT, mask_BT)
    if weight_BT is not None:
        loss_BT *= weight_BT
        report["importance_weight"] = weight_BT
    if o.kl_coef:
        report["kl"] = kl.ESTIMATORS[o.kl_estimator](logp_BT, rows.ref_logp_BT)
        loss_BT += o.kl_coef * report["kl"]
    if o.entropy_coef:
        loss_BT -= o.entropy_coef * entropy_BT
    if o.aggregator == "lambda_grpo":  # the row's own length comes first
        there_BN = rows.length_BN > 0
        weight_BN = aggregators.length_weight(rows.length_BN, exponent, there_BN, o.lambda_ratio)
        loss_BT *= weight_BN[:, :1]
    token_sum = lambda x_BT: aggregators.token_mean(stop_gradient(x_BT), mask_BT)[0]
    return loss_BT, {name: token_sum(x_BT) for name, x_BT in report.items()}


def aggregate(o: Objective, loss_BT: Array, mask_BT: Array) -> tuple[Array, Array]:
    """(sum, count), by the aggregator's name; lambda-GRPO's is the token mean of weighted rows."""
    match o.aggregator:
        case "token_mean" | "lambda_grpo":
            return aggregators.token_mean(loss_BT, mask_BT)
        case "sequence_mean_token_mean":
            return aggregators.sequence_mean_token_mean(loss_BT, mask_BT)
        case "sequence_mean_token_sum":
            return aggregators.sequence_mean_token_sum(loss_BT, mask_BT)
        case "constant_length":
            return aggregators.constant_length(loss_BT, mask_BT, o.constant_length)
    raise ValueError(f"no aggregator {o.aggregator!r}")
