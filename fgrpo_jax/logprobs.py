"""Log-probabilities and entropies of response tokens, chunked: never a [B, T, V] array."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from fgrpo_jax import sharding
from fgrpo_jax.model import Policy
from fgrpo_jax.packing import at_width
from fgrpo_jax.structs import LearnerBatch


def response_logprobs(
    policy: Policy,
    params: Any,
    tokens_BS: Int[Array, "B S"],
    start_B: Int[Array, " B"],
    response: int,
    temperature: float,
    chunk: int,
    entropy_gradient: bool = False,
    samples: int = 1,
    part_BT: Int[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """log pi(token) of the last T tokens of each row, and the entropy of pi there, in nats.

    Args:
        tokens_BS: rows of prompt (left-padded) and response.
        start_B: column of each row's first real token.
        response: T, response columns.
        temperature: above 0; it divides the logits, as in sampling.
        chunk: response columns whose logits are in memory at a time.
        entropy_gradient: whether the entropy passes its gradient, as an entropy bonus needs.
        samples: so many adjacent rows have one prompt, which is computed once for them.
        part_BT: numbers of the responses in packed rows, as LearnerBatch.part_Bs; where T is S
            they hold prompts too, and what comes out of those means nothing.
    """
    with jax.named_scope("logprobs"):
        target_BT = tokens_BS[:, -response:]
        if part_BT is not None and part_BT.shape == tokens_BS.shape:
            hidden_BTD = policy.hidden(params, tokens_BS, start_B, part_BT)
            hidden_BTD = jnp.roll(hidden_BTD, 1, axis=1)
        elif samples > 1 or part_BT is not None:
            first = lambda x: x.reshape(-1, samples, *x.shape[1:])[:, 0]
            prompt_PC, start_P = first(tokens_BS[:, :-response]), first(start_B)
            hidden_BTD = policy.response_hidden(params, prompt_PC, start_P, target_BT, part_BT)
        else:
            hidden_BSD = policy.hidden(params, tokens_BS, start_B)
            hidden_BTD = hidden_BSD[:, -response - 1 : -1]  # column j predicts column j + 1

        def piece(hidden_BtD, target_Bt):
            logits_BtV = policy.logits(params, hidden_BtD, temperature)
            top_Bt = jax.lax.stop_gradient(logits_BtV.max(axis=-1))
            logits_BtV -= top_Bt[..., None]
            odds_BtV = jnp.exp(logits_BtV)
            sum_Bt = odds_BtV.sum(axis=-1)
            logp_Bt = jnp.asarray(_pick(logits_BtV.shape[-1], logits_BtV, target_Bt))
            logp_Bt -= jnp.log(sum_Bt)
            seen = (odds_BtV, logits_BtV, sum_Bt)
            odds_BtV, logits_BtV, sum_Bt = seen if entropy_gradient else jax.lax.stop_gradient(seen)
            entropy_Bt = jnp.log(sum_Bt) - (odds_BtV * logits_BtV).sum(axis=-1) / sum_Bt
            return logp_Bt, entropy_Bt

        if response <= chunk:
            return piece(hidden_BTD, target_BT)
        pieces = -(-response // chunk)
        pad = [(0, 0), (0, pieces * chunk - response)]

        def split(x):  # [B, T, ...] -> [pieces, B, chunk, ...]
            x = jnp.pad(x, pad + [(0, 0)] * (x.ndim - 2))
            return x.reshape(x.shape[0], pieces, chunk, *x.shape[2:]).swapaxes(0, 1)

        def join(x):
            return x.swapaxes(0, 1).reshape(x.shape[1], -1)[:, :response]

        again = jax.checkpoint(piece)  # the backward pass makes a chunk's logits again
        logp, entropy = jax.lax.map(lambda xs: again(*xs), (split(hidden_BTD), split(target_BT)))
        return join(logp), join(entropy)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _pick(vocab: int, x_BTV: Array, index_BT: Array) -> Array:
    """x_BTV[b, t, index_BT[b, t]]; a gather's gradient would scatter into an array of zeros."""
    return jnp.take_along_axis(x_BTV, index_BT[..., None], axis=-1)[..., 0]


def _pick_forward(vocab: int, x_BTV: Array, index_BT: Array) -> tuple[Array, Array]:
    return _pick(vocab, x_BTV, index_BT), index_BT


def _pick_backward(vocab: int, index_BT: Array, y_BT: Array) -> tuple[Array, None]:
    here_BTV = jnp.arange(vocab)[None, None] == index_BT[..., None]
    return jnp.where(here_BTV, y_BT[..., None], 0), None


_pick.defvjp(_pick_forward, _pick_backward)


def rows_logprobs(
    policy: Policy,
    params: Any,
    rows: LearnerBatch,
    temperature: float,
    chunk: int,
    entropy_gradient: bool = False,
    samples: int = 1,
) -> tuple[Array, Array]:
    """The same of a microbatch, in the shape of its mask: of packed rows by column."""
    return response_logprobs(
        policy, params, rows.tokens_BS, rows.start_B, rows.mask_BT.shape[-1], temperature, chunk,
        entropy_gradient, samples if rows.part_Bs is None else 1, rows.part_Bs,
    )  # fmt: skip


def batch_logprobs(
    policy: Policy,
    params: Any,
    batch: LearnerBatch,
    temperature: float,
    chunk: int,
    samples: int = 1,
    widths: tuple[int, ...] = (),
) -> Array:
    """log pi(token) of the responses of [minibatches, microbatches, rows], a microbatch at a time:
    [minibatches, microbatches, rows, T]. widths: those that batch.width_ZZ means."""
    T = batch.mask_BT.shape[-1]

    def microbatch(rows: LearnerBatch) -> Array:
        logp_BT, _ = rows_logprobs(policy, params, rows, temperature, chunk, samples=samples)
        return jnp.pad(logp_BT, [(0, 0), (0, T - logp_BT.shape[1])])

    def minibatch(micros: LearnerBatch, used: Array | int) -> Array:
        def body(i, logp):
            rows = jax.tree.map(lambda x: x[i], micros)
            logp_BT = at_width(widths, rows, microbatch)
            return jax.lax.dynamic_update_index_in_dim(logp, logp_BT, i, axis=0)

        return jax.lax.fori_loop(0, used, body, jnp.zeros(micros.mask_BT.shape, jnp.float32))

    micros, used_Z = dataclasses.replace(batch, used_Z=None), batch.used_Z
    if used_Z is None:
        return jax.lax.map(lambda x: minibatch(x, batch.mask_BT.shape[1]), micros)
    return jax.lax.map(lambda xs: minibatch(*xs), (micros, used_Z))


def make_logprobs(
    policy: Policy, temperature: float, chunk: int, mesh: Mesh, whose: str
) -> Callable[..., Array]:
    """The jitted logprobs(params, batch, base=None, samples=1, widths=()), as batch_logprobs.

    whose: "old" or "reference", in the program's name and its scope in a profile.
    """

    def logprobs(
        params: Any,
        batch: LearnerBatch,
        base: Any = None,
        samples: int = 1,
        widths: tuple[int, ...] = (),
    ) -> Array:
        with jax.named_scope(whose):
            params = policy.weights(params, base)
            return batch_logprobs(policy, params, batch, temperature, chunk, samples, widths)

    logprobs.__name__ = f"{whose}_logprobs"
    out = sharding.activation(mesh, "ZZBT")
    return jax.jit(logprobs, out_shardings=out, static_argnames=("samples", "widths"))
