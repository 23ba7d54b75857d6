"""Draws tokens from float32 logits: temperature, truncation, and the log-probability of each.

B rows    V vocabulary    X parts of it, one a tp device    b blocks of a part    w tokens each
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fgrpo_jax import sharding
from fgrpo_jax.numerics import MASKED


@dataclasses.dataclass(frozen=True)
class Sampling:
    """The distribution that is sampled from, as a change of the policy's.

    Applied in this order, as transformers and SGLang do: temperature, top-k, top-p, min-p.
    """

    temperature: float = 1.0  # divides the logits; 0: greedy
    top_k: int = 0  # only so many of the likeliest tokens; 0: all
    top_p: float = 1.0  # only the likeliest tokens that together reach this probability
    min_p: float = 0.0  # only tokens with at least this share of the likeliest one's probability

    @property
    def truncated(self) -> bool:
        return not self.temperature or bool(self.top_k) or self.top_p < 1 or self.min_p > 0


def truncate(logits_BV: Float[Array, "B V"], s: Sampling) -> Float[Array, "B V"]:
    """The logits, MASKED where top-k, top-p or min-p leave a token out. Of equal logits at a
    bound all stay. Nothing is sorted: bounds are found by bisection, each step a masked sum."""
    if s.top_k:
        ones_BV = jnp.ones_like(logits_BV)
        logits_BV = _keep_from(logits_BV, _largest_bound(logits_BV, ones_BV, float(s.top_k)))
    if s.top_p < 1:
        p_BV = jax.nn.softmax(logits_BV, axis=-1)
        logits_BV = _keep_from(logits_BV, _largest_bound(logits_BV, p_BV, s.top_p))
    if s.min_p:
        least_B1 = logits_BV.max(axis=-1, keepdims=True) + jnp.log(s.min_p)
        logits_BV = _keep_from(logits_BV, least_B1)
    return logits_BV


def _keep_from(logits_BV: Array, least_B1: Array) -> Array:
    return jnp.where(logits_BV >= least_B1, logits_BV, MASKED)


def _largest_bound(logits_BV: Array, weight_BV: Array, target: float) -> Array:
    """[B, 1], the largest bound such that the weights of logits not below it reach the target, to
    a float32's precision; where all do not reach it, below all but the impossible."""
    top_B1 = logits_BV.max(axis=-1, keepdims=True)

    def halve(_, bounds):
        low_B1, high_B1 = bounds
        middle_B1 = (low_B1 + high_B1) / 2
        there_BV = logits_BV >= middle_B1
        enough_B1 = jnp.where(there_BV, weight_BV, 0).sum(axis=-1, keepdims=True) >= target
        return jnp.where(enough_B1, middle_B1, low_B1), jnp.where(enough_B1, high_B1, middle_B1)

    # e^-100 of the likeliest token's probability is none in float32
    low_B1, _ = jax.lax.fori_loop(0, 32, halve, (top_B1 - 100, top_B1 + 1))
    return low_B1


def draw(
    logits_BV: Float[Array, "B V"], uniform_B: Float[Array, " B"], s: Sampling
) -> tuple[Int[Array, " B"], Float[Array, " B"], Float[Array, " B"] | None]:
    """(tokens, their log-probabilities under the policy, the same under what was sampled from).

    Args:
        logits_BV: divided by the temperature; by 1 where it is 0.
        uniform_B: one number of [0, 1) a row.
    Returns:
        None for the last where nothing is truncated: it would be the second once more.
    """
    if s.temperature:
        kept_BV = truncate(logits_BV, s)
        token_B, log_mass_B = sample_token(kept_BV, uniform_B)
    else:
        token_B = jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
        log_mass_B = jax.nn.logsumexp(logits_BV, axis=-1)
    chosen_B = jnp.take_along_axis(logits_BV, token_B[:, None], axis=1)[:, 0]
    if not s.truncated:
        return token_B, chosen_B - log_mass_B, None
    if not s.temperature:  # all probability is on the greedy token
        return token_B, chosen_B - log_mass_B, jnp.zeros_like(chosen_B)
    logp_B = chosen_B - jax.nn.logsumexp(logits_BV, axis=-1)
    return token_B, logp_B, chosen_B - log_mass_B


def sample_token(
    logits_BV: Float[Array, "B V"], uniform_B: Float[Array, " B"]
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """Draws from softmax(logits) by the inverse of its distribution function: first a part of
    the vocabulary, then a block in it, then a token. One number of [0, 1) a row.

    Parts are what the tp devices hold, and each finds its own candidate: only masses of parts and
    candidates travel. Returns also log(sum(exp(logits))), which falls out.
    """
    B, V = logits_BV.shape
    X = sharding.shards("tp")
    parts = X if V % X == 0 else 1
    top_B1 = logits_BV.max(axis=-1, keepdims=True)
    p_BXV = jnp.exp(logits_BV - top_B1).reshape(B, parts, V // parts)
    if parts == X:
        p_BXV = sharding.constrain(p_BXV, "BXV")
    width, blocks = _blocks(V // parts)
    pad = [(0, 0), (0, 0), (0, width * blocks - V // parts)]
    p_BXbw = jnp.pad(p_BXV, pad).reshape(B, parts, blocks, width)
    mass_BXb = p_BXbw.sum(axis=-1)
    mass_BX = mass_BXb.sum(axis=-1)
    upto_BX = jnp.cumsum(mass_BX, axis=-1)
    target_B = uniform_B * upto_BX[:, -1]
    part_B = _first_above(upto_BX, mass_BX, target_B)
    rest_BX = target_B[:, None] - (upto_BX - mass_BX)
    upto_BXb = jnp.cumsum(mass_BXb, axis=-1)
    block_BX = _first_above(upto_BXb, mass_BXb, rest_BX)
    rest_BX -= jnp.take_along_axis(upto_BXb - mass_BXb, block_BX[..., None], axis=-1)[..., 0]
    p_BXw = jnp.take_along_axis(p_BXbw, block_BX[..., None, None], axis=2)[:, :, 0]
    token_BX = block_BX * width + _first_above(jnp.cumsum(p_BXw, axis=-1), p_BXw, rest_BX)
    token_B = jnp.take_along_axis(token_BX, part_B[:, None], axis=1)[:, 0]
    return part_B * (V // parts) + token_B, top_B1[:, 0] + jnp.log(upto_BX[:, -1])


def _blocks(tokens: int) -> tuple[int, int]:
    """(width, number) of blocks, both near the square root."""
    width = 1 << ((tokens - 1).bit_length() + 1) // 2
    return width, -(-tokens // width)


def _first_above(upto: Array, p: Array, target: Array) -> Array:
    """First index whose running sum exceeds the target; rounding may leave none: then the last
    that has any probability. An index of probability 0 is never returned, if one has more."""
    above = (upto > target[..., None]) & (p > 0)
    last = p.shape[-1] - 1 - jnp.argmax(p[..., ::-1] > 0, axis=-1)
    return jnp.where(above.any(axis=-1), jnp.argmax(above, axis=-1), last).astype(jnp.int32)
