"""Policy-gradient surrogates by token, and named aggregators: arrays in, arrays out.

With d = logp - old_logp, r = exp(d), A the advantage. Losses are to be minimised and are not
reduced: what normalises them is the experiment, so an aggregator is chosen by name. Values at
masked tokens are finite and do not matter.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

MAX_LOG_RATIO = 20.0  # |d| beyond it is clamped, as in verl: exp stays finite


def _ratio(logp: Array, old_logp: Array) -> Array:
    return jnp.exp(jnp.clip(logp - old_logp, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def ppo_clip(
    logp_BT: Float[Array, "B T"],
    old_logp_BT: Float[Array, "B T"],
    advantage_BT: Float[Array, " B #T"],
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 3.0,
) -> Float[Array, "B T"]:
    """PPO's clipped surrogate, with separate bounds and dual clip.

        loss = max(-A r, -A clip(r, 1 - low, 1 + high)),  at A < 0 at most -A c

    F-GRPO (arXiv 2602.06717), eq 14; clip-higher: DAPO (arXiv 2503.14476); dual clip:
    arXiv 1912.09729, on by default in verl.

    Args:
        logp_BT, old_logp_BT: log-probabilities of the sampled tokens, now and when sampled.
        advantage_BT: one a row ([B, 1]) or one a token.
        clip_low, clip_high: the ratio pays between 1 - low and 1 + high; DAPO: 0.2, 0.28.
        dual_clip: c > 1, or 0 for none.

    >>> ppo_clip(jnp.log(jnp.array([[1.5]])), jnp.zeros((1, 1)), jnp.ones((1, 1))).tolist()
    [[-1.2000000476837158]]
    """
    ratio_BT = _ratio(logp_BT, old_logp_BT)
    clipped_BT = jnp.clip(ratio_BT, 1 - clip_low, 1 + clip_high)
    loss_BT = jnp.maximum(-advantage_BT * ratio_BT, -advantage_BT * clipped_BT)
    if dual_clip:
        bound_BT = jnp.minimum(loss_BT, -advantage_BT * dual_clip)
        loss_BT = jnp.where(advantage_BT < 0, bound_BT, loss_BT)
    return loss_BT


def cispo(
    logp_BT: Float[Array, "B T"],
    old_logp_BT: Float[Array, "B T"],
    advantage_BT: Float[Array, " B #T"],
    clip_low: float = 1.0,
    clip_high: float = 5.0,
) -> Float[Array, "B T"]:
    """CISPO: policy gradient with a clipped importance weight, so that no token is dropped.

        loss = -stop_gradient(clip(r, 1 - low, 1 + high)) A logp

    MiniMax-M1 (arXiv 2506.13585); F-GRPO (arXiv 2602.06717), eqs 15 and 16. The bounds are
    verl's: low 1 and high 5 clamp the weight to [0, 6]. TRL's `epsilon_high` is 1 + high.

    >>> cispo(jnp.array([[-1.0]]), jnp.array([[-9.0]]), jnp.ones((1, 1))).tolist()
    [[6.0]]
    """
    weight_BT = jnp.clip(_ratio(logp_BT, old_logp_BT), 1 - clip_low, 1 + clip_high)
    return -jax.lax.stop_gradient(weight_BT) * advantage_BT * logp_BT


def policy_gradient(
    logp_BT: Float[Array, "B T"], advantage_BT: Float[Array, " B #T"]
) -> Float[Array, "B T"]:
    """REINFORCE: loss = -A logp. With A = 1, maximum likelihood.

    >>> policy_gradient(jnp.array([[-2.0]]), jnp.ones((1, 1))).tolist()
    [[2.0]]
    """
    return -advantage_BT * logp_BT


def is_clipped(
    logp_BT: Float[Array, "B T"],
    old_logp_BT: Float[Array, "B T"],
    advantage_BT: Float[Array, " B #T"],
    clip_low: float,
    clip_high: float,
) -> Bool[Array, "B T"]:
    """Whether the ratio has left its bounds in the direction that the advantage pushes it."""
    ratio_BT = _ratio(logp_BT, old_logp_BT)
    above_BT = (ratio_BT > 1 + clip_high) & (advantage_BT > 0)
    return above_BT | ((ratio_BT < 1 - clip_low) & (advantage_BT < 0))


def token_mean(
    loss_BT: Float[Array, "B T"], mask_BT: Bool[Array, "B T"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """(sum over tokens, number of tokens): their quotient is the mean over all tokens.

    verl's `token-mean`, TRL's `dapo`. Sum both over microbatches and devices, then divide once:
    a mean of means would weigh tokens by the length of their neighbours.

    >>> total, count = token_mean(jnp.array([[1.0, 3.0]]), jnp.array([[True, True]]))
    >>> float(total / count)
    2.0
    """
    return jnp.where(mask_BT, loss_BT, 0).sum(), mask_BT.sum().astype(loss_BT.dtype)
