"""Group-relative advantages and the focal weight: arrays in, arrays out."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


@functools.partial(jax.jit, static_argnames="eps")
def group_advantage(reward_PN: Float[Array, "P N"], eps: float = 1e-6) -> Float[Array, "P N"]:
    """GRPO's advantage: each reward against the others of its group.

        A = (R - mean R) / (std R + eps)

    F-GRPO (arXiv 2602.06717), eq 3; std is Bessel's (N - 1), as in verl. A group whose rewards
    are all equal gets exactly 0: told by max == min, since the float32 std of eight rewards of
    0.7 is 6e-8, not 0.

    Args:
        reward_PN: rewards of N samples of each of P prompts, any finite range.
        eps: added to the standard deviation, in units of the reward.

    Returns:
        advantages, zero-mean in each group; 0 for a group of one.

    >>> (2 * group_advantage(jnp.array([[1.0, 0.0, 0.0, 0.0]]))).round().tolist()
    [[3.0, -1.0, -1.0, -1.0]]
    """
    samples = reward_PN.shape[1]
    reward_PN = _at_least_float32(reward_PN)
    centred_PN = reward_PN - reward_PN.mean(axis=1, keepdims=True)
    variance_P1 = (centred_PN**2).sum(axis=1, keepdims=True) / max(samples - 1, 1)
    constant_P1 = is_constant(reward_PN)[:, None]
    variance_P1 = jnp.where(constant_P1, 1, variance_P1)  # sqrt has no gradient at 0
    return jnp.where(constant_P1, 0, centred_PN / (jnp.sqrt(variance_P1) + eps))


def is_constant(reward_PN: Float[Array, "P N"]) -> Bool[Array, " P"]:
    """Whether all rewards of a group are equal, so that it teaches nothing."""
    return reward_PN.max(axis=1) == reward_PN.min(axis=1)


@jax.jit
def success_rate(correct_PN: Float[Array, "P N"]) -> Float[Array, " P"]:
    """The empirical success rate of each group, unsmoothed.

        mu = X / N,  X samples right of N

    F-GRPO (arXiv 2602.06717), eq 11.

    Args:
        correct_PN: raw correctness, 1 right and 0 wrong: not a shaped reward.
    """
    return _at_least_float32(correct_PN).mean(axis=1)


@functools.partial(jax.jit, static_argnames="gamma")
def focal_weight(correct_PN: Float[Array, "P N"], gamma: float) -> Float[Array, " P"]:
    """F-GRPO's weight, which turns learning from what the policy already knows.

        g = (1 - mu) ** gamma

    F-GRPO (arXiv 2602.06717), eq 12; it multiplies a group's advantages (eq 13) and is not
    renormalised over the batch.

    Args:
        correct_PN: raw correctness, 1 right and 0 wrong.
        gamma: at least 0; 0 gives 1 everywhere (plain GRPO), the paper uses 0.5 to 1.

    Returns:
        weights in [0, 1]: 1 where none is right, 0 where all are (and gamma > 0).

    >>> focal_weight(jnp.array([[1.0, 0.0, 0.0, 0.0]]), 2.0).tolist()
    [0.5625]
    """
    if gamma < 0:
        raise ValueError(f"gamma is {gamma}: it must be at least 0")
    # Counted, and exact at both ends: compiled, 1 - mean may come out below 0, and N * (1 / N)
    # below 1, since XLA divides by a constant through its reciprocal.
    wrong_P = (1 - _at_least_float32(correct_PN)).sum(axis=1)
    samples = correct_PN.shape[1]
    return jnp.where(wrong_P == samples, 1, wrong_P / samples) ** gamma


def _at_least_float32(x: Array) -> Array:
    return x if x.dtype == jnp.float64 else x.astype(jnp.float32)
