"""The shapes of sampling: slots, waiting prompts and columns, and the memory that they take."""

import dataclasses
import math

import jax.numpy as jnp

from fgrpo_jax import UserError, sharding
from fgrpo_jax.model import Policy
from fgrpo_jax.sampling import Sampling
from fgrpo_jax.validation import Config

MIN_WIDTH = 128  # columns that attention reads at least: with fewer little is saved
SCORES = 2**30  # bytes of attention scores while prompts are prefilled, at most
TILE = 16  # columns of a bfloat16 tile of a TPU; of another number XLA copies the cache


@dataclasses.dataclass(frozen=True)
class SamplerSettings:
    """What is static in sampling."""

    samples: int  # N, samples a prompt
    response: int  # T, most tokens of a response
    sampling: Sampling
    stop_ids: tuple[int, ...]
    chunk: int = 64  # decode steps between two looks of the host
    slots: int = 256  # rows that decode at a time, over all devices; as many on each
    waiting: int = 0  # prompts prefilled ahead, over all devices; 0: enough for a chunk
    prefill: int = 8192  # tokens that a device prefills at a time

    def __post_init__(self) -> None:
        for name in "samples response chunk slots prefill".split():
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if not self.stop_ids:
            raise ValueError("stop_ids is empty: name the token that ends a response")

    @property
    def steps(self) -> int:
        """Of a chunk: more than a response has would only widen the cache."""
        return min(self.chunk, self.response)


@dataclasses.dataclass(frozen=True)
class Layout:
    """The shapes of a call; but for `shards` everything is a device's own share of the rows."""

    shards: int  # X
    prompts: int
    slots: int
    waiting: int  # prompts in the room
    group: int  # prompts prefilled at a time
    columns: int  # C
    cached: int  # S
    refills: bool  # whether slots take more than one sample
    widths: tuple[int, ...]  # columns that attention reads, one compiled loop each

    @classmethod
    def of(cls, s: SamplerSettings, prompts: int, columns: int, ragged: bool) -> "Layout":
        """For `prompts` of all devices, of `columns` tokens; ragged: attention finds each row's
        columns itself."""
        X = sharding.shards(*sharding.ROWS)
        if prompts % X:
            raise ValueError(f"{prompts} prompts do not divide among the {X} devices of rows")
        own = prompts // X
        slots = min(-(-s.slots // X), own * s.samples)
        refills = slots < own * s.samples
        group = max(1, min(own, s.prefill // columns))
        waiting = group
        if refills:
            waiting = min(own, -(-s.waiting // X) or math.ceil(slots * _waiting_a_slot(s, X)))
            group = min(group, max(1, waiting // 2))  # or no place were free until all are
            waiting -= waiting % group
        cached = _cached(s, columns, refills)
        powers = [1 << k for k in range(32) if max(columns, MIN_WIDTH) <= 1 << k <= cached / 1.5]
        widths = (cached,) if ragged else (*powers, cached)
        return cls(X, own, slots, waiting, group, columns, cached, refills, widths)

    def width(self, columns: int) -> int:
        """The least width that holds so many; beyond all of them where slots are refilled, since
        the cache has to be moved back then."""
        beyond = 2 * self.cached if self.refills else self.cached
        return next((width for width in self.widths if width >= columns), beyond)


def cache_bytes(policy: Policy, layout: Layout) -> int:
    """Bytes of keys and values, of slots and waiting prompts over all devices."""
    column = policy.config.column_bytes(jnp.dtype(policy.dtype).itemsize)
    places = layout.slots * layout.cached + layout.waiting * layout.columns
    return column * layout.shards * places


def _cached(s: SamplerSettings, columns: int, refills: bool) -> int:
    # a row that is alive began at most C + T - 1 columns ago, and a chunk must fit behind it
    cached = columns + s.response + (s.steps if refills else 0)
    return cached + -cached % TILE


def settings_of(
    c: Config,
    policy: Policy,
    samples: int,
    sampling: Sampling,
    stop_ids: tuple[int, ...],
    columns: int,
) -> SamplerSettings:
    """A run's, with the slots that rollout.cache_gib holds where rollout.slots is 0."""
    s = SamplerSettings(
        samples, c.rollout.max_response, sampling, stop_ids, c.rollout.chunk,
        c.rollout.slots or 1, c.rollout.waiting, c.rollout.prefill,
    )  # fmt: skip
    if c.rollout.slots:
        return s
    return dataclasses.replace(s, slots=slots_that_fit(policy, s, columns, c.rollout.cache_gib))


def _waiting_a_slot(s: SamplerSettings, shards: int) -> float:
    """Prompts that should wait for a slot: those of its samples in a chunk, if responses had a
    quarter of their limit, and one more sample; twice so many where several devices refill at the
    pace of the slowest."""
    return min(2.0, (1 + 4 * s.steps / s.response) / s.samples * (1 if shards == 1 else 2))


def slots_that_fit(policy: Policy, s: SamplerSettings, columns: int, gib: float) -> int:
    """Slots, over all devices of jax.set_mesh's mesh, whose cache, waiting prompts and logits take
    so many GiB of each. UserError where not one does."""
    c, X, tp = policy.config, sharding.shards(*sharding.ROWS), sharding.shards("tp")
    column = c.column_bytes(jnp.dtype(policy.dtype).itemsize, tp)
    logits = 3 * 4 * -(-c.vocab // tp)  # and two copies while a token is drawn
    slot = column * _cached(s, columns, refills=True) + logits
    budget = gib * 2**30 - column * columns * -(-s.waiting // X)
    if not s.waiting:
        slot += column * columns * _waiting_a_slot(s, X)
    if budget < slot:
        raise UserError(
            f"rollout.cache_gib is {gib:g} and holds no slot: one of {columns} + {s.response} "
            f"tokens needs {(slot + gib * 2**30 - budget) / 2**30:.3g} GiB"
        )
    return X * int(budget / slot)


def piece(policy: Policy, s: SamplerSettings, rows: int, columns: int) -> int:
    """Columns prefilled at a time, of so many rows a device: XLA's attention scores, which no
    kernel keeps small, must stay under SCORES too."""
    size = max(1, s.prefill // rows)
    if policy.backends[0] == "xla":
        heads = -(-policy.config.heads // sharding.shards("tp"))
        size = min(size, max(TILE, SCORES // (4 * rows * heads * columns)))
    return size
