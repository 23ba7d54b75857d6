"""Policy-gradient losses and importance weights by token: arrays in, arrays out.

With d = logp - old_logp, r = exp(d), A the advantage, one a row ([B, 1]) or one a token. Losses
are to be minimised and are not reduced: what normalises them is the experiment, so an aggregator
(aggregators.py) is chosen by name. Log-probabilities are of the sampled tokens, in nats, at the
temperature they were sampled at. Values at masked tokens do not matter, as long as they are
finite. Each function is jitted with its settings (Python numbers) static, and can be called inside
jit, grad, vmap, scan and shard_map.
"""

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient
from jaxtyping import Array, Bool, Float

from fgrpo_jax.numerics import (
    MAX_LOG_RATIO,
    at_least_float32,
    clamped_difference,
    kernel,
    masked_mean,
)

MAX_LOG_SEQUENCE_RATIO = 10.0  # of GSPO, as in verl

Tokens = Float[Array, "B T"]
Advantage = Float[Array, " B #T"]
Mask = Bool[Array, "B T"]


@kernel()
def importance_ratio(logp_BT: Tokens, old_logp_BT: Tokens) -> Tokens:
    """r = exp(logp - old_logp), the logarithm clamped to +-20.

    >>> importance_ratio(jnp.array([[-1.0]]), jnp.array([[-1.0]])).tolist()
    [[1.0]]
    """
    return jnp.exp(clamped_difference(logp_BT, old_logp_BT))


@kernel()
def sequence_ratio(logp_BT: Tokens, old_logp_BT: Tokens, mask_BT: Mask) -> Float[Array, "B 1"]:
    """s = exp(mean d) of each row, the mean at most 10: the geometric mean of its tokens' ratios.

    >>> mask = jnp.array([[True, True]])
    >>> sequence_ratio(jnp.array([[-1.0, -3.0]]), jnp.array([[-2.0, -2.0]]), mask).tolist()
    [[1.0]]
    """
    d_BT = at_least_float32(logp_BT) - at_least_float32(old_logp_BT)
    return jnp.exp(jnp.minimum(masked_mean(d_BT, mask_BT), MAX_LOG_SEQUENCE_RATIO))


@kernel("clip_low", "clip_high", "dual_clip")
def ppo_clip(
    logp_BT: Tokens,
    old_logp_BT: Tokens,
    advantage_BT: Advantage,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 3.0,
) -> Tokens:
    """PPO's clipped surrogate, with separate bounds and dual clip.

        loss = max(-A r, -A clip(r, 1 - low, 1 + high)),  at A < 0 at most -A c

    F-GRPO (arXiv 2602.06717), eq 14; clip-higher: DAPO (arXiv 2503.14476); dual clip:
    arXiv 1912.09729, on by default in verl, and TRL's `delta`.

    Args:
        logp_BT, old_logp_BT: now and when sampled.
        clip_low, clip_high: the ratio pays between 1 - low and 1 + high; DAPO: 0.2, 0.28.
        dual_clip: c > 1, or 0 for none (TRL's default).

    >>> ppo_clip(jnp.log(jnp.array([[1.5]])), jnp.zeros((1, 1)), jnp.ones((1, 1))).tolist()
    [[-1.2000000476837158]]
    """
    ratio_BT = importance_ratio(logp_BT, old_logp_BT)
    return _clipped(ratio_BT, at_least_float32(advantage_BT), clip_low, clip_high, dual_clip)


def _clipped(ratio: Array, advantage: Array, low: float, high: float, dual: float) -> Array:
    loss = jnp.maximum(-advantage * ratio, -advantage * jnp.clip(ratio, 1 - low, 1 + high))
    if dual:
        loss = jnp.where(advantage < 0, jnp.minimum(loss, -advantage * dual), loss)
    return loss


@kernel("clip_low", "clip_high")
def cispo(
    logp_BT: Tokens,
    old_logp_BT: Tokens,
    advantage_BT: Advantage,
    clip_low: float = 1.0,
    clip_high: float = 5.0,
) -> Tokens:
    """CISPO: policy gradient with a clipped importance weight, so that no token is dropped.

        loss = -stop_gradient(clip(r, 1 - low, 1 + high)) A logp

    MiniMax-M1 (arXiv 2506.13585); F-GRPO (arXiv 2602.06717), eqs 15 and 16. The bounds are
    verl's: low 1 and high 5 clamp the weight to [0, 6]. TRL's `epsilon_high` is 1 + high.

    >>> cispo(jnp.array([[-1.0]]), jnp.array([[-9.0]]), jnp.ones((1, 1))).tolist()
    [[6.0]]
    """
    weight_BT = jnp.clip(importance_ratio(logp_BT, old_logp_BT), 1 - clip_low, 1 + clip_high)
    advantage_BT = at_least_float32(advantage_BT)
    return -stop_gradient(weight_BT) * advantage_BT * at_least_float32(logp_BT)


@kernel("clip_low", "clip_high")
def gspo(
    logp_BT: Tokens,
    old_logp_BT: Tokens,
    advantage_BT: Advantage,
    mask_BT: Mask,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Tokens:
    """GSPO: PPO's surrogate with one ratio a sequence, the geometric mean of its tokens'.

        loss = max(-A s, -A clip(s, 1 - low, 1 + high)),  s = sequence_ratio, at every token

    arXiv 2507.18071, eqs 5 and 7; the bounds are hundreds of times narrower than PPO's. TRL's
    `importance_sampling_level="sequence"`. The paper's aggregator is the sequence mean of token
    means.

    >>> one, mask = jnp.ones((1, 1)), jnp.array([[True, True]])
    >>> gspo(jnp.array([[-1.0, -3.0]]), jnp.array([[-2.0, -2.0]]), one, mask).tolist()
    [[-1.0, -1.0]]
    """
    ratio_B1 = sequence_ratio(logp_BT, old_logp_BT, mask_BT)
    loss_BT = _clipped(ratio_B1, at_least_float32(advantage_BT), clip_low, clip_high, 0.0)
    return jnp.broadcast_to(loss_BT, mask_BT.shape)


@kernel("clip_low", "clip_high")
def gspo_token(
    logp_BT: Tokens,
    old_logp_BT: Tokens,
    advantage_BT: Advantage,
    mask_BT: Mask,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Tokens:
    """GSPO-token: GSPO's ratio in value, each token's own in gradient.

        s_t = stop_gradient(s) exp(logp - stop_gradient(logp))

    arXiv 2507.18071, eq 14; verl's form of GSPO. Equal to gspo where a row has one advantage.
    """
    ratio_B1 = stop_gradient(sequence_ratio(logp_BT, old_logp_BT, mask_BT))
    logp_BT = at_least_float32(logp_BT)
    ratio_BT = ratio_B1 * jnp.exp(logp_BT - stop_gradient(logp_BT))
    return _clipped(ratio_BT, at_least_float32(advantage_BT), clip_low, clip_high, 0.0)


@kernel("clip_low", "clip_high")
def gmpo(
    logp_BT: Tokens,
    old_logp_BT: Tokens,
    advantage_BT: Advantage,
    mask_BT: Mask,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> Tokens:
    """GMPO: the geometric mean of clipped token ratios (arXiv 2507.20673).

        d' = max or min (A < 0, else) of d and clip(d, -low, high);  loss = -A exp(mean d')

    The same value at each token of a sequence; the paper's aggregator is the sequence mean of
    token means. verl's `geo_mean`, which counts empty rows.
    """
    advantage_BT = jnp.broadcast_to(at_least_float32(advantage_BT), mask_BT.shape)
    sign_BT = jnp.sign(advantage_BT)
    d_BT = clamped_difference(logp_BT, old_logp_BT)
    clipped_BT = jnp.clip(d_BT, -clip_low, clip_high)
    d_BT = sign_BT * jnp.minimum(sign_BT * d_BT, sign_BT * clipped_BT)
    mean = lambda x_BT: masked_mean(x_BT, mask_BT, eps=1e-8)  # verl's eps
    loss_B1 = -mean(advantage_BT) * jnp.exp(mean(d_BT))
    return jnp.broadcast_to(loss_B1, mask_BT.shape)


@kernel("temperature_right", "temperature_wrong")
def sapo(
    logp_BT: Tokens,
    old_logp_BT: Tokens,
    advantage_BT: Advantage,
    temperature_right: float = 1.0,
    temperature_wrong: float = 1.05,
) -> Tokens:
    """SAPO: a sigmoid gate in place of the clip (arXiv 2511.20347).

        loss = -A sigmoid(tau (r - 1)) 4 / tau

    Args:
        temperature_right, temperature_wrong: tau where A > 0, and elsewhere.

    >>> sapo(jnp.zeros((1, 1)), jnp.zeros((1, 1)), jnp.ones((1, 1))).tolist()
    [[-2.0]]
    """
    advantage_BT = at_least_float32(advantage_BT)
    tau_BT = jnp.where(advantage_BT > 0, temperature_right, temperature_wrong)
    gate_BT = jax.nn.sigmoid(tau_BT * (importance_ratio(logp_BT, old_logp_BT) - 1))
    return -advantage_BT * gate_BT * 4 / tau_BT


@kernel()
def policy_gradient(logp_BT: Tokens, advantage_BT: Advantage) -> Tokens:
    """REINFORCE: loss = -A logp. With A = 1, maximum likelihood. verl's `gpg`.

    >>> policy_gradient(jnp.array([[-2.0]]), jnp.ones((1, 1))).tolist()
    [[2.0]]
    """
    return -at_least_float32(advantage_BT) * at_least_float32(logp_BT)


@kernel("clip_low", "clip_high")
def is_clipped(
    ratio_BT: Float[Array, " B #T"],
    advantage_BT: Advantage,
    clip_low: float,
    clip_high: float,
) -> Bool[Array, "B ..."]:
    """Whether the ratio has left its bounds in the direction that the advantage pushes it."""
    above_BT = (ratio_BT > 1 + clip_high) & (advantage_BT > 0)
    return above_BT | ((ratio_BT < 1 - clip_low) & (advantage_BT < 0))


@kernel("level", "high")
def truncated_importance_weight(
    old_logp_BT: Tokens,
    sampler_logp_BT: Tokens,
    mask_BT: Mask,
    level: str = "token",
    high: float = 2.0,
) -> Tokens:
    """TIS: min(w, high), which multiplies a loss where sampler and trainer differ.

        w = exp(old_logp - sampler_logp) of the token, or its product over the sequence

    https://fengyao.notion.site/off-policy-rl; verl's `rollout_is`, with its 2.0. No gradient.

    Args:
        old_logp_BT, sampler_logp_BT: of the same policy, by the trainer and by the sampler.
        level: "token" or "sequence".

    >>> mask = jnp.array([[True, True]])
    >>> truncated_importance_weight(jnp.array([[2.0, 0.0]]), jnp.zeros((1, 2)), mask).tolist()
    [[2.0, 1.0]]
    """
    return jnp.minimum(_drift(old_logp_BT, sampler_logp_BT, mask_BT, level), high)


@kernel("level", "low", "high")
def masked_importance_weight(
    old_logp_BT: Tokens,
    sampler_logp_BT: Tokens,
    mask_BT: Mask,
    level: str = "token",
    low: float = 0.5,
    high: float = 5.0,
) -> Tokens:
    """IcePop: w where low <= w <= high, and 0 elsewhere. Arguments as truncated_importance_weight.

    arXiv 2510.18855, with its bounds. TRL's `sequence_mask` is level "sequence", low 0, high 3.
    """
    weight_BT = _drift(old_logp_BT, sampler_logp_BT, mask_BT, level)
    return jnp.where((weight_BT >= low) & (weight_BT <= high), weight_BT, 0)


def _drift(old_logp_BT: Array, sampler_logp_BT: Array, mask_BT: Array, level: str) -> Array:
    d_BT = at_least_float32(old_logp_BT) - at_least_float32(sampler_logp_BT)
    d_BT = jnp.where(mask_BT, d_BT, 0)
    if level == "sequence":
        d_BT = jnp.broadcast_to(d_BT.sum(axis=1, keepdims=True), d_BT.shape)
    elif level != "token":
        raise ValueError(f"level is {level!r}: it must be token or sequence")
    return stop_gradient(jnp.exp(jnp.clip(d_BT, -MAX_LOG_RATIO, MAX_LOG_RATIO)))
