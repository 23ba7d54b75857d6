"""Slots that decode, and the room where prefilled prompts wait: what runs on the devices.

    B slots    P waiting prompts    N samples of each    C prompt columns    S cached columns
    T tokens   X devices that share rows

All slots write the same column of the cache, the clock's: one update a token. A slot's row lies
in columns start .. clock - 1, wherever it began. When a row ends, its slot takes the next sample
of a waiting prompt, inside the jitted loop: the prompt's keys and values are copied to the
columns before the clock.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array

from fgrpo_jax import sharding
from fgrpo_jax.layout import Layout, SamplerSettings, piece
from fgrpo_jax.model import Cache, Policy, blocks
from fgrpo_jax.sampling import draw
from fgrpo_jax.sharding import constrain


@struct.dataclass
class Room:
    """Prefilled prompts that wait."""

    cache: Any  # Cache [L, P, K, C, H]
    hidden_PD: Any  # of the last token
    length_P: Any  # 0: an empty prompt, which says nothing
    position_P: Any  # seeds its samples


@struct.dataclass
class Slots:
    """The decode loop's state."""

    cache: Any  # Cache [L, B, K, S, H]
    hidden_BD: Any  # of the newest token
    start_B: Any  # column of the row's first prompt token
    key_B: Any  # of the sample
    sample_B: Any  # number of the sample, counted a device: prompt * N + n
    age_B: Any  # response tokens so far
    alive_B: Any
    given_X: Any  # samples that a device has handed to its slots


ROOM = Room("LBKSH", "BD", "B", "B")  # type: ignore[arg-type]  # how they lie on the mesh
SLOTS = Slots("LBKSH", "BD", "B", "B", "B", "B", "B", "B")  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class Programs:
    """Jitted; `empty` makes what the others take and give back, donated."""

    empty: Any  # (params, layout) -> slots, room
    prefill: Any  # (params, room, tokens_PC, length_P, position_P, place) -> room
    decode: Any  # (params, slots, room, ready, clock, key, ended_B, steps, width) -> slots, ...
    move_back: Any  # (slots, by) -> slots


def make_programs(policy: Policy, settings: SamplerSettings) -> Programs:
    """Sample n of the prompt at a position has the key fold_in(fold_in(key, position), n), and its
    token t is drawn with fold_in(that, t): so that it is the same in any slot, on any mesh."""
    s, N = settings, settings.samples

    @functools.partial(jax.jit, static_argnames="layout")
    def empty(params: Any, layout: Layout) -> tuple[Slots, Room]:
        c, X = policy.config, layout.shards
        layers = [jax.tree.leaves(block)[0].shape[0] for block in blocks(params)]

        def cache(rows: int, columns: int) -> Cache:
            shapes = [(n, rows, c.kv_heads, columns, c.head_size) for n in layers]
            zeros = lambda: tuple(constrain(jnp.zeros(x, policy.dtype), "LBKSH") for x in shapes)
            return Cache(zeros(), zeros())

        P, B = X * layout.waiting, X * layout.slots
        ints = lambda rows: constrain(jnp.zeros(rows, jnp.int32), "B")
        hidden = lambda rows: constrain(jnp.zeros((rows, c.width), policy.dtype), "BD")
        key_B = jnp.broadcast_to(jax.random.key(0, impl="threefry2x32"), B)
        alive_B = constrain(jnp.zeros(B, bool), "B")
        slots = Slots(
            cache(B, layout.cached), hidden(B), ints(B), constrain(key_B, "B"), ints(B), ints(B),
            alive_B, ints(X),
        )  # fmt: skip
        return slots, Room(cache(P, layout.columns), hidden(P), ints(P), ints(P))

    @functools.partial(jax.jit, donate_argnames="room")
    def prefill(params, room: Room, tokens_PC, length_P, position_P, place) -> Room:
        """The room with a group of prompts in places `place` and on."""
        with jax.named_scope("rollout"), jax.named_scope("prefill"):
            start_P, C = tokens_PC.shape[1] - length_P, tokens_PC.shape[1]
            cache = hidden_PD = None
            size = piece(policy, s, len(tokens_PC) // sharding.shards(*sharding.ROWS), C)
            for begin in range(0, C, size):  # a long prompt in pieces, to bound activations
                piece_PC = tokens_PC[:, begin : begin + size]
                hidden_PD, new = policy.prefill(params, piece_PC, start_P, cache)
                join = lambda *x: jnp.concatenate(x, axis=3)
                cache = new if cache is None else jax.tree.map(join, cache, new)

            def put(room: Room, group: Room, place: Array) -> Room:
                def write(x, new):
                    axis = 1 if x.ndim == 5 else 0
                    return lax.dynamic_update_slice_in_dim(x, new, place, axis)

                return jax.tree.map(write, room, group)

            group = Room(cache, hidden_PD, length_P, position_P)
            return sharding.local(put, (ROOM, ROOM, ""), ROOM)(room, group, place)

    def refill(slots: Slots, room: Room, ready: Array, clock: Array, key: Array) -> Slots:
        """Each free slot of a device takes the next sample of the `ready` prompts that its room
        has had, until there is none."""

        def wanted(slots: Slots) -> Array:
            return ~slots.alive_B.all() & (slots.given_X[0] < ready * N)

        def give(slots: Slots) -> Slots:
            given, b = slots.given_X[0], jnp.argmin(slots.alive_B)
            place, n = given // N % room.length_P.shape[0], given % N
            length = room.length_P[place]

            def copy(x_LBKSH, x_LPKCH):
                prompt_L1KCH = lax.dynamic_slice_in_dim(x_LPKCH, place, 1, axis=1)
                C = x_LPKCH.shape[3]
                return lax.dynamic_update_slice(x_LBKSH, prompt_L1KCH, (0, b, 0, clock - C, 0))

            row_key = jax.random.fold_in(jax.random.fold_in(key, room.position_P[place]), n)
            return Slots(
                cache=jax.tree.map(copy, slots.cache, room.cache),
                hidden_BD=slots.hidden_BD.at[b].set(room.hidden_PD[place]),
                start_B=slots.start_B.at[b].set(clock - length),
                key_B=slots.key_B.at[b].set(row_key),
                sample_B=slots.sample_B.at[b].set(given),
                age_B=slots.age_B.at[b].set(0),
                alive_B=slots.alive_B.at[b].set(length > 0),
                given_X=slots.given_X + jnp.where(length > 0, 1, N),
            )

        with jax.named_scope("refill"):
            return lax.while_loop(wanted, give, slots)

    def step(params: Any, slots: Slots, clock: Array, width: int) -> tuple[Slots, tuple]:
        """One token in each slot that is alive, and the record of it."""
        with jax.named_scope("sampling"):
            logits_BV = policy.logits(params, slots.hidden_BD, s.sampling.temperature or 1.0)
            keys_B = jax.vmap(jax.random.fold_in)(slots.key_B, slots.age_B)
            token_B, logp_B, sampled_B = draw(
                logits_BV, jax.vmap(jax.random.uniform)(keys_B), s.sampling
            )
        token_B = jnp.where(slots.alive_B, token_B, s.stop_ids[0])
        record = token_B, jnp.where(slots.alive_B, slots.sample_B, -1), logp_B, sampled_B
        hidden_BD, cache = policy.decode(params, token_B, slots.start_B, clock, slots.cache, width)
        age_B = slots.age_B + 1
        ended_B = jnp.isin(token_B, jnp.array(s.stop_ids)) | (age_B == s.response)
        return dataclasses.replace(
            slots, hidden_BD=constrain(hidden_BD, "BD"), cache=cache, age_B=age_B,
            alive_B=slots.alive_B & ~ended_B,
        ), record  # fmt: skip

    @functools.partial(jax.jit, donate_argnames="slots", static_argnames="width")
    def decode(params, slots: Slots, room: Room, ready, clock, key, ended_B, steps, width):
        """Up to `steps` tokens a slot: slots, records [T B] and what the host needs to know."""
        with jax.named_scope("rollout"), jax.named_scope("decode"):
            local_refill = sharding.local(refill, (SLOTS, ROOM, "", "", ""), SLOTS)

            def more(state) -> Array:
                t, slots, _ = state
                return (t < steps) & slots.alive_B.any()

            def body(state):
                t, slots, records = state
                slots, record = step(params, slots, clock + t, width)
                put = functools.partial(lax.dynamic_update_index_in_dim, index=t, axis=0)
                records = jax.tree.map(put, records, record)
                return t + 1, local_refill(slots, room, ready, clock + t + 1, key), records

            slots = dataclasses.replace(slots, alive_B=slots.alive_B & ~ended_B)
            slots = local_refill(slots, room, ready, clock, key)
            table = lambda x, kind: constrain(jnp.full((s.steps, *ended_B.shape), x, kind), "TB")
            records = table(0, jnp.int32), table(-1, jnp.int32), table(0, jnp.float32), None
            if s.sampling.truncated:
                records = (*records[:3], table(0, jnp.float32))
            t, slots, records = lax.while_loop(more, body, (jnp.int32(0), slots, records))
            clock += t
            status = {
                "clock": clock,
                "oldest": jnp.where(slots.alive_B, slots.start_B, clock).min(),
                "given": slots.given_X.min(),
                "alive": slots.alive_B.any(),
                "free": ~slots.alive_B.all(),
            }
            return slots, records, status

    @functools.partial(jax.jit, donate_argnames="slots")
    def move_back(slots: Slots, by: Array) -> Slots:
        """Columns `by` and on become columns 0 and on; layer by layer, to need no second cache."""

        def shift(x_LBKSH):
            def one(i, x):
                return x.at[i].set(jnp.roll(x[i], -by, axis=2))

            return lax.fori_loop(0, x_LBKSH.shape[0], one, x_LBKSH)

        with jax.named_scope("rollout"), jax.named_scope("move_back"):
            cache = jax.tree.map(shift, slots.cache)
        return dataclasses.replace(slots, cache=cache, start_B=slots.start_B - by)

    return Programs(empty, prefill, decode, move_back)
