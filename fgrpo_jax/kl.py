"""Estimators of KL(policy || reference) by token, from samples of the policy.

With x = ref_logp - logp, clamped to +-20 so that a far token gives finite values and gradients.
http://joschu.net/blog/kl-approx.html. Each is jitted, and can be called inside jit, grad, vmap,
scan and shard_map.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax.lax import stop_gradient
from jaxtyping import Array, Float

from fgrpo_jax.numerics import clamped_difference, kernel

Tokens = Float[Array, "B T"]


@kernel()
def k1(logp_BT: Tokens, ref_logp_BT: Tokens) -> Tokens:
    """-x: unbiased in value; as a loss, its gradient is 0 in expectation.

    >>> k1(jnp.array([[-1.0]]), jnp.array([[-3.0]])).tolist()
    [[2.0]]
    """
    return -clamped_difference(ref_logp_BT, logp_BT)


@kernel()
def absolute(logp_BT: Tokens, ref_logp_BT: Tokens) -> Tokens:
    """|x|: verl's `abs`."""
    return jnp.abs(clamped_difference(ref_logp_BT, logp_BT))


@kernel()
def k2(logp_BT: Tokens, ref_logp_BT: Tokens) -> Tokens:
    """x ** 2 / 2: biased in value; as a loss, its gradient is that of the KL.

    >>> k2(jnp.array([[-1.0]]), jnp.array([[-3.0]])).tolist()
    [[2.0]]
    """
    return clamped_difference(ref_logp_BT, logp_BT) ** 2 / 2


@kernel("highest")
def k3(logp_BT: Tokens, ref_logp_BT: Tokens, highest: float = 10.0) -> Tokens:
    """exp(x) - x - 1: unbiased and never negative.

    Args:
        highest: where larger, it is this, without gradient: 10 in verl and NeMo-RL; TRL has
            none (infinity), and by default multiplies it by the importance ratio.

    >>> k3(jnp.array([[-1.0]]), jnp.array([[-1.0]])).tolist()
    [[0.0]]
    """
    x_BT = clamped_difference(ref_logp_BT, logp_BT)
    return jnp.minimum(jnp.expm1(x_BT) - x_BT, highest)


@kernel()
def straight_through(value_BT: Tokens, gradient_BT: Tokens) -> Tokens:
    """The first in value and the second in gradient: straight_through(k3, k2) is verl's `k3+`."""
    return stop_gradient(value_BT - gradient_BT) + gradient_BT


ESTIMATORS: dict[str, Callable[..., Array]] = {  # by verl's names
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "abs": absolute,
    "k1+": lambda logp, ref: straight_through(k1(logp, ref), k2(logp, ref)),
    "k3+": lambda logp, ref: straight_through(k3(logp, ref), k2(logp, ref)),
}
