"""Samples responses: prefill once a group, then a jitted decode loop in chunks."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int, Key

from fgrpo_jax.model import Cache, Policy
from fgrpo_jax.sharding import constrain
from fgrpo_jax.structs import Samples


@dataclasses.dataclass(frozen=True)
class SamplerSettings:
    """What is static in sampling."""

    samples: int  # N, samples a prompt
    response: int  # T, most tokens of a response
    temperature: float  # 0: greedy
    stop_ids: tuple[int, ...]
    chunk: int  # decode steps between two looks of the host


@struct.dataclass
class _Loop:
    """The decode loop's state."""

    hidden_BD: Array  # of the newest token
    cache: Cache
    samples: Samples
    t: Array  # response tokens so far
    start_B: Array
    key_B: Array


def sample_token(logits_BV: Float[Array, "B V"], uniform_B: Float[Array, " B"]) -> Int[Array, " B"]:
    """Draws from softmax(logits) by the inverse of its distribution function, on two levels:
    first a block of about sqrt(V) tokens, then a token in it. One number of [0, 1) a row."""
    B, V = logits_BV.shape
    width = 1 << ((V - 1).bit_length() + 1) // 2
    blocks = -(-V // width)
    p_BV = jnp.exp(logits_BV - logits_BV.max(axis=-1, keepdims=True))
    p_Bbw = jnp.pad(p_BV, [(0, 0), (0, blocks * width - V)]).reshape(B, blocks, width)
    mass_Bb = p_Bbw.sum(axis=-1)
    upto_Bb = jnp.cumsum(mass_Bb, axis=-1)
    target_B = uniform_B * upto_Bb[:, -1]
    block_B = _first_above(upto_Bb, mass_Bb, target_B)
    before_Bb = upto_Bb - mass_Bb
    rest_B = target_B - jnp.take_along_axis(before_Bb, block_B[:, None], axis=1)[:, 0]
    p_Bw = jnp.take_along_axis(p_Bbw, block_B[:, None, None], axis=1)[:, 0]
    return block_B * width + _first_above(jnp.cumsum(p_Bw, axis=-1), p_Bw, rest_B)


def _first_above(upto_Bx: Array, p_Bx: Array, target_B: Array) -> Array:
    """First index whose running sum exceeds the target; rounding may leave none: then the last
    that has any probability. An index of probability 0 is never returned."""
    above_Bx = (upto_Bx > target_B[:, None]) & (p_Bx > 0)
    last_B = p_Bx.shape[1] - 1 - jnp.argmax(p_Bx[:, ::-1] > 0, axis=1)
    return jnp.where(above_Bx.any(axis=1), jnp.argmax(above_Bx, axis=1), last_B).astype(jnp.int32)


def make_sampler(
    policy: Policy, settings: SamplerSettings
) -> Callable[[Any, Array, Array, Array], Samples]:
    """The jitted sample(params, tokens_PC, length_P, key_B) -> Samples.

    Prompts are left-padded. Each row's tokens depend on its own key and prompt alone: token t is
    drawn with fold_in(key, t), so that results do not depend on the batch around them. The
    log-probability returned is that of the distribution sampled from, or at temperature 0 that
    of the greedy token at temperature 1.
    """
    N, T = settings.samples, settings.response

    @jax.jit
    def prefill(
        params: Any,
        tokens_PC: Int[Array, "P C"],
        length_P: Int[Array, " P"],
        key_B: Key[Array, " B"],
    ) -> _Loop:
        with jax.named_scope("prefill"):
            C = tokens_PC.shape[1]
            start_P = C - length_P
            hidden_PCD, cache = policy.prefill(params, tokens_PC, start_P)

            def room(x_LPKCH):  # for the response, and for each sample its own
                x = jnp.pad(x_LPKCH, [(0, 0)] * 3 + [(0, T), (0, 0)])
                return constrain(jnp.repeat(x, N, axis=1), "LBKSH")

            B = key_B.shape[0]
            samples = Samples(
                tokens_BT=constrain(jnp.full((B, T), settings.stop_ids[0], jnp.int32), "BT"),
                mask_BT=constrain(jnp.zeros((B, T), bool), "BT"),
                logp_BT=constrain(jnp.zeros((B, T), jnp.float32), "BT"),
                # the empty prompts that fill up a batch say nothing
                finished_B=constrain(jnp.repeat(length_P == 0, N), "B"),
            )
            return _Loop(
                hidden_BD=constrain(jnp.repeat(hidden_PCD[:, -1], N, axis=0), "BD"),
                cache=jax.tree.map(room, cache),
                samples=samples,
                t=jnp.int32(0),
                start_B=constrain(jnp.repeat(start_P, N, axis=0), "B"),
                key_B=key_B,
            )

    def step(params: Any, loop: _Loop) -> _Loop:
        s, t = loop.samples, loop.t
        logits_BV = policy.logits(params, loop.hidden_BD, settings.temperature or 1.0)
        if settings.temperature:
            uniform_B = jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, t)))(
                loop.key_B
            )
            token_B = sample_token(logits_BV, uniform_B)
        else:
            token_B = jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
        chosen_B = jnp.take_along_axis(logits_BV, token_B[:, None], axis=1)[:, 0]
        logp_B = chosen_B - jax.nn.logsumexp(logits_BV, axis=-1)
        alive_B = ~s.finished_B
        token_B = jnp.where(alive_B, token_B, settings.stop_ids[0])
        put = functools.partial(jax.lax.dynamic_update_index_in_dim, index=t, axis=1)
        samples = Samples(
            tokens_BT=put(s.tokens_BT, token_B),
            mask_BT=put(s.mask_BT, alive_B),
            logp_BT=put(s.logp_BT, jnp.where(alive_B, logp_B, 0)),
            finished_B=s.finished_B | jnp.isin(token_B, jnp.array(settings.stop_ids)),
        )
        prompt = loop.cache.k_LBKSH.shape[3] - T
        hidden_BD, cache = policy.decode(params, token_B, loop.start_B, prompt + t, loop.cache)
        return dataclasses.replace(
            loop, hidden_BD=constrain(hidden_BD, "BD"), cache=cache, samples=samples, t=t + 1
        )

    @functools.partial(jax.jit, donate_argnums=1)
    def decode_chunk(params: Any, loop: _Loop) -> tuple[_Loop, Array]:
        with jax.named_scope("decode"):
            end = jnp.minimum(loop.t + settings.chunk, T)
            unfinished = lambda loop: (loop.t < end) & ~loop.samples.finished_B.all()
            loop = jax.lax.while_loop(unfinished, functools.partial(step, params), loop)
            return loop, (loop.t >= T) | loop.samples.finished_B.all()

    def sample(params, tokens_PC, length_P, key_B) -> Samples:
        loop, done = prefill(params, tokens_PC, length_P, key_B), False
        while not done:
            loop, done = decode_chunk(params, loop)
        return loop.samples

    return sample
