"""Samples responses: one prefill a prompt, and slots that its samples pass through.

The host's side. Between two chunks of the decode loop it gathers what was sampled, prefills more
prompts, and moves the cache back to column 0, so that attention reads no more columns than the
oldest row needs, rounded up to one of a few widths.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from fgrpo_jax import distributed, sharding
from fgrpo_jax.layout import Layout, SamplerSettings
from fgrpo_jax.model import Policy
from fgrpo_jax.slots import make_programs
from fgrpo_jax.structs import Prompts, Response, Samples, Watch, unwatched

Stream = Callable[..., Iterator[list[Response]]]
Stopped = Callable[[np.ndarray, int], int | None]


def make_sampler(
    policy: Policy, settings: SamplerSettings, stopped: Stopped | None = None
) -> Stream:
    """stream(params, prompts, key, watch) -> lists of the Responses that have ended since the last.

    Prompts are this host's, and each of the N responses of prompt p has a row p * N + n. Results
    depend neither on slots nor on the order of prompts or the mesh. `watch` is called before
    each chunk of the loop and at its end, and may raise to abandon the rest.

    Args:
        stopped: (tokens so far, how many of them are new) -> the number of tokens to keep where
            the text has come to a stop, else None. Asked between chunks.
    """
    programs = make_programs(policy, settings)
    s, N, ragged = settings, settings.samples, policy.backends[1] == "ragged"
    warm: set[Layout] = set()

    def stream(
        params: Any, prompts: Prompts, key: Array, watch: Watch = unwatched
    ) -> Iterator[list[Response]]:
        hosts, C = distributed.hosts(), prompts.tokens_PC.shape[1]
        layout = Layout.of(s, len(prompts.length_P) * hosts, C, ragged)
        shards = layout.shards // hosts  # that are this host's
        groups = -(-layout.prompts // layout.group)
        joined = _Joiner(s, layout, shards, stopped)
        wanted = int(np.count_nonzero(prompts.length_P)) * N
        now = dict(clock=C, oldest=C, given=0, free=True, alive=False)  # what the devices say
        slots, room = programs.empty(params, layout)
        ready = done = 0  # groups prefilled, steps decoded
        ended_B = np.zeros(shards * layout.slots, bool)  # where text has stopped

        def prefill() -> None:
            nonlocal room, ready
            group = [
                _to_rows(_group(x, shards, layout, ready))
                for x in (prompts.tokens_PC, prompts.length_P, prompts.position_P)
            ]
            place = ready * layout.group % layout.waiting
            room = programs.prefill(params, room, *group, np.int32(place))
            ready += 1

        def decode(steps: int, width: int) -> list[Response]:
            nonlocal slots, now, ended_B
            slots, records, status = programs.decode(
                params, slots, room, np.int32(ready * layout.group), np.int32(now["clock"]), key,
                _to_rows(ended_B), np.int32(steps), width=width,
            )  # fmt: skip
            ended, ended_B = joined(distributed.to_host(records, axis=1))
            now = {name: x.item() for name, x in jax.device_get(status).items()}
            return ended

        def fill() -> None:
            """Prefills until no slot is free, or the room is full."""
            while (
                ready < groups and (ready + 1) * layout.group <= now["given"] // N + layout.waiting
            ):
                prefill()
                if now["free"] and ready < groups:
                    decode(0, layout.cached)

        for width in () if layout in warm else layout.widths:
            decode(0, width)  # compiles all in the first call, and none in a later one
            slots = programs.move_back(slots, np.int32(0))
        warm.add(layout)
        all_given = groups * layout.group * N
        while now["alive"] or now["given"] < all_given:
            watch(joined.responses, wanted, joined.tokens, done)
            fill()
            # room for a waiting prompt stays before the clock
            by = min(now["oldest"], now["clock"] - (C if now["given"] < all_given else 0))
            end = now["clock"] + s.steps
            if layout.width(end - by) < layout.width(end):
                slots = programs.move_back(slots, np.int32(by))
                now["clock"] -= by
            steps = min(s.steps, layout.cached - now["clock"])
            before = now["clock"]
            ended = decode(steps, layout.width(before + steps))
            done += now["clock"] - before
            yield ended
        watch(joined.responses, wanted, joined.tokens, done)

    return stream


def gather(responses: Iterable[list[Response]], rows: int, settings: SamplerSettings) -> Samples:
    """All responses of a call as arrays; rows that say nothing are masked."""
    T = settings.response
    samples = Samples(
        tokens_BT=np.full((rows, T), settings.stop_ids[0], np.int32),
        mask_BT=np.zeros((rows, T), bool),
        logp_BT=np.zeros((rows, T), np.float32),
        drawn_logp_BT=np.zeros((rows, T), np.float32) if settings.sampling.truncated else None,
        finished_B=np.ones(rows, bool),
    )
    for response in (response for some in responses for response in some):
        row, length = response.row, len(response.tokens)
        samples.tokens_BT[row, :length] = response.tokens
        samples.mask_BT[row, :length] = True
        samples.logp_BT[row, :length] = response.logp
        if samples.drawn_logp_BT is not None:
            samples.drawn_logp_BT[row, :length] = response.drawn_logp
        samples.finished_B[row] = response.finished
    return samples


def _group(x: np.ndarray, shards: int, layout: Layout, number: int) -> np.ndarray:
    """The number-th prompts of each device of this host; the last are filled up with empty ones."""
    x = x.reshape(shards, layout.prompts, *x.shape[1:])
    x = x[:, number * layout.group : (number + 1) * layout.group]
    pad = [(0, 0), (0, layout.group - x.shape[1])] + [(0, 0)] * (x.ndim - 2)
    return np.pad(x, pad).reshape(shards * layout.group, *x.shape[2:])


def _to_rows(x: np.ndarray) -> Array:
    """This host's rows on the mesh of jax.set_mesh, if there is one."""
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        return jnp.asarray(x)
    return distributed.to_global(x, sharding.activation(mesh, "B" if x.ndim == 1 else "BT"))


class _Joiner:
    """Puts the records of the chunks together to responses."""

    def __init__(
        self, settings: SamplerSettings, layout: Layout, shards: int, stopped: Stopped | None
    ):
        self.settings, self.stopped = settings, stopped
        slot = np.arange(shards * layout.slots)
        self.first_row_B = slot // layout.slots * layout.prompts * settings.samples
        self.open: dict[int, list[np.ndarray]] = {}  # row -> [tokens, logp, sampled logp] so far
        self.responses = self.tokens = 0

    def __call__(self, records: tuple[Any, ...]) -> tuple[list[Response], np.ndarray]:
        """Takes (tokens, sample numbers, log-probabilities, ...) [T B] of a chunk; returns what
        has ended, and in which slots the text has."""
        token_TB, sample_TB, *logps = (x for x in records if x is not None)
        ended_B = np.zeros(len(self.first_row_B), bool)
        t, b = np.nonzero(sample_TB.T >= 0)[::-1]  # slot by slot, in the order of time
        row = self.first_row_B[b] + sample_TB[t, b]
        ended = []
        bounds = np.flatnonzero(np.diff(row, prepend=-1, append=-1))
        for begin, end in zip(bounds[:-1], bounds[1:], strict=True):
            here = t[begin:end], b[begin:end]
            new = [x[here] for x in (token_TB, *logps)]
            response, on_device = self._add(int(row[begin]), new)
            if response:
                ended.append(response)
                ended_B[b[begin]] |= not on_device
        self.responses += len(ended)
        self.tokens += len(row)
        return ended, ended_B

    def _add(self, row: int, new: list[np.ndarray]) -> tuple[Response | None, bool]:
        """The row's Response if it has ended, and whether the device knows that it has."""
        so_far = self.open.pop(row, [x[:0] for x in new])
        arrays = [np.concatenate(pair) for pair in zip(so_far, new, strict=True)]
        tokens = arrays[0]
        finished = tokens[-1] in self.settings.stop_ids
        on_device = finished or len(tokens) == self.settings.response
        keep = self.stopped(tokens, len(new[0])) if self.stopped else None
        if not on_device and keep is None:
            self.open[row] = arrays
            return None, False
        tokens, logp, *drawn_logp = (x[:keep] for x in arrays)
        drawn_logp = drawn_logp[0] if drawn_logp else None
        return Response(row, tokens, logp, drawn_logp, finished or keep is not None), on_device
