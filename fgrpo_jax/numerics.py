"""What the library's files share: precision, static settings, means and group statistics."""

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.lax import stop_gradient
from jaxtyping import Array

MAX_LOG_RATIO = 20.0  # nats, as in verl
MASKED = -1e30  # of scores and logits; finite, so that a row with none left gives no NaN


Result = TypeVar("Result")


def kernel(*settings: str) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """jax.jit with the named settings static: `@kernel("eps")`. Takes numpy's arrays too."""
    return functools.partial(jax.jit, static_argnames=settings)


def at_least_float32(x: Array) -> Array:
    """bfloat16, integers and booleans as float32; float64 stays, where the user has it on."""
    x = jnp.asarray(x)
    return x if x.dtype == jnp.float64 else x.astype(jnp.float32)


def clamped_difference(a: Array, b: Array) -> Array:
    """a - b of two log-probabilities, within +-MAX_LOG_RATIO: its exponential stays finite."""
    return jnp.clip(at_least_float32(a) - at_least_float32(b), -MAX_LOG_RATIO, MAX_LOG_RATIO)


def masked_mean(x: Array, mask: Array, eps: float = 0.0) -> Array:
    """Over the last axis, kept, its length plus eps; 0 where the mask is empty."""
    count = mask.sum(axis=-1, keepdims=True).astype(x.dtype)
    return jnp.where(mask, x, 0).sum(axis=-1, keepdims=True) / (jnp.maximum(count, 1) + eps)


class Groups(NamedTuple):
    """Rewards with the statistics of their group, which is the last axis.

    A group whose rewards are all equal teaches nothing. That is told by max == min, never by the
    standard deviation, since in float32 that of eight rewards of 0.7 is 6e-8.
    """

    reward: Array  # [..., N]
    valid: Array  # [..., N]
    number: Array  # [..., 1], of valid rewards
    mean: Array  # [..., 1]
    centred: Array  # [..., N], 0 where invalid and in constant groups
    constant: Array  # [..., 1]

    def std(self, ddof: int = 1) -> Array:
        """[..., 1]; 1 in constant groups, since sqrt has no gradient at 0."""
        variance = (self.centred**2).sum(axis=-1, keepdims=True)
        variance /= jnp.maximum(self.number - ddof, 1)
        return jnp.sqrt(jnp.where(self.constant, 1, variance))


def group_statistics(reward: Array, valid: Array | None = None) -> Groups:
    """Of the valid rewards of each group, in at least float32; valid None: all."""
    reward = at_least_float32(reward)
    valid = jnp.ones(reward.shape, bool) if valid is None else valid.astype(bool)
    reward = jnp.where(valid, reward, 0)  # whatever an invalid one holds, NaN too
    number = valid.sum(axis=-1, keepdims=True).astype(reward.dtype)
    lowest = jnp.where(valid, reward, jnp.inf).min(axis=-1, keepdims=True)
    highest = jnp.where(valid, reward, -jnp.inf).max(axis=-1, keepdims=True)
    constant = highest <= lowest
    # Centred on the lowest first: a large constant in all rewards then rounds nothing away.
    base = stop_gradient(jnp.where(number > 0, lowest, 0))
    mean = masked_mean(reward - base, valid)
    centred = jnp.where(valid & ~constant, reward - base - mean, 0)
    return Groups(reward, valid, number, base + mean, centred, constant)
