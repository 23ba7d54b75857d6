"""So that little padding is computed: responses of a group packed into rows behind one prompt,
whole sequences packed into rows, or microbatches of rows of like length.

R packed rows    C prompt columns    S = C + s columns    M responses in a row at most

Rows of whole sequences have no columns before them: C is 0 there, and S is s.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from fgrpo_jax import distributed
from fgrpo_jax.structs import LearnerBatch

BY_TOKEN = "mask_BT sampler_logp_BT drawn_logp_BT ref_logp_BT old_logp_BT".split()


def by_length(
    batch: LearnerBatch,
    samples: int,
    shared: int,
    minibatches: int,
    microbatches: int,
    widths: tuple[int, ...],
) -> LearnerBatch:
    """The rows of this host, those of each minibatch ordered by length, with width_ZZ: of each
    microbatch the first of the ascending widths that all its rows fit in, on every host.

    Args:
        samples: adjacent rows that have one prompt.
        shared: so many of those, which it divides, stay adjacent: a device computes their prompt
            once. They are those of a prompt that are most alike in length.
    """
    order = lambda length: np.argsort(length, axis=-1, kind="stable")
    length_PN = batch.mask_BT.sum(axis=1).reshape(-1, samples)
    row_PN = order(length_PN) + np.arange(len(length_PN))[:, None] * samples
    row_ZUM = row_PN.reshape(minibatches, -1, shared)
    longest_ZU = length_PN.reshape(-1)[row_ZUM].max(axis=2)
    row_ZUM = np.take_along_axis(row_ZUM, order(longest_ZU)[..., None], axis=1)
    batch = jax.tree.map(lambda x: x[row_ZUM.reshape(-1)], batch)
    length_ZZB = batch.mask_BT.sum(axis=1).reshape(minibatches, microbatches, -1)
    longest_ZZ = distributed.largest(length_ZZB.max(axis=2))
    width_ZZ = np.searchsorted(widths, longest_ZZ).astype(np.int32)
    return dataclasses.replace(batch, width_ZZ=width_ZZ)


def at_width(
    widths: tuple[int, ...], rows: LearnerBatch, function: Callable[[LearnerBatch], Any]
) -> Any:
    """function(a microbatch on a device cut to its width); its results' shapes may not depend on
    that. It is compiled for each width."""
    if rows.width_ZZ is None:
        return function(rows)
    T = rows.mask_BT.shape[1]

    def cut(width: int, rows: LearnerBatch) -> Any:
        tokens = {name: x[:, :width] for name in BY_TOKEN if (x := getattr(rows, name)) is not None}
        whole = rows.tokens_BS[:, : rows.tokens_BS.shape[1] - T + width]
        return function(dataclasses.replace(rows, tokens_BS=whole, **tokens))

    branches = [functools.partial(cut, width) for width in widths]
    return jax.lax.switch(rows.width_ZZ, branches, dataclasses.replace(rows, width_ZZ=None))


def first_fit(size_M: np.ndarray, columns: int, most: int) -> list[list[int]]:
    """Which of so many columns share a row: the largest first, each into the first row that has
    room for it and holds fewer than `most`. Those of no columns are in none."""
    room, places = np.full(len(size_M), columns), np.full(len(size_M), most)
    rows: list[list[int]] = [[] for _ in size_M]
    for i in np.argsort(-size_M, kind="stable")[: np.count_nonzero(size_M)]:
        row = int(np.argmax((room >= size_M[i]) & (places > 0)))
        rows[row].append(int(i))
        room[row] -= size_M[i]
        places[row] -= 1
    return [row for row in rows if row]


def pack(
    batch: LearnerBatch,
    samples: int,
    minibatches: int,
    micro_rows: int,
    columns: int,
    whole: bool = False,
) -> LearnerBatch:
    """The rows of this host packed: fewer rows, each of a prompt and several of its responses.

    Args:
        batch: rows of prompt and response on the host; those of a prompt are adjacent.
        samples: rows that have one prompt, M; so many are in a packed row at most.
        minibatches: each of as many prompts, one after the other.
        micro_rows: packed rows of this host in a microbatch.
        columns: s, response columns of a packed row, at least the longest response.
        whole: rows hold sequences instead, each a prompt and its response, of any prompts of a
            minibatch: s counts both, and no columns come before them.

    Returns:
        minibatches * microbatches * micro_rows packed rows: what is by token has shape [R, s],
        what is by response [R * M]. Of each minibatch the first used_Z microbatches hold all
        responses, on every host.
    """
    rows, T = batch.mask_BT.shape
    C = batch.tokens_BS.shape[1] - T
    length_B = batch.mask_BT.sum(axis=1)
    before_B = C - batch.start_B if whole else np.zeros_like(length_B)  # columns of its own prompt
    size_B = np.where(length_B > 0, before_B + length_B, 0)
    numbers_P = np.arange(rows).reshape(-1, samples)
    packed: list[list[list[int]]] = []  # rows of the batch in each row, of each minibatch
    for prompts in np.array_split(numbers_P, minibatches):
        together = [prompts.reshape(-1)] if whole else prompts  # may share a row
        packed.append(
            [
                own[fit].tolist()
                for own in together
                for fit in first_fit(size_B[own], columns, samples)
            ]
        )
    most = -(-rows // minibatches // micro_rows) * micro_rows  # if every response had a row
    used_Z = [
        max(1, int(distributed.largest(-(-len(minibatch) // micro_rows)))) for minibatch in packed
    ]
    R, shared = minibatches * most, 0 if whole else C  # columns of a prompt for all of a row
    tokens_RS = np.zeros((R, shared + columns), np.int32)
    start_R = np.full(R, shared, np.int32)
    part_Rs = np.zeros((R, columns), np.int32)
    begin_RM, length_RM = np.zeros((2, R, samples), np.int32)
    source_RM = np.full((R, samples), -1)  # row of the batch
    by_token = {
        name: (x, np.zeros((R, columns), x.dtype))
        for name in BY_TOKEN
        if (x := getattr(batch, name)) is not None
    }
    for z, minibatch in enumerate(packed):
        for r, members in enumerate(minibatch, z * most):
            tokens_RS[r, :shared] = batch.tokens_BS[members[0], :shared]
            start_R[r] = min(shared, batch.start_B[members[0]])
            end = 0
            for m, row in enumerate(members):
                first, begin, size = end, end + before_B[row], length_B[row]
                end = begin + size
                own = batch.tokens_BS[row, C - before_B[row] : C + size]
                tokens_RS[r, shared + first : shared + end] = own
                part_Rs[r, first:end] = m + 1
                begin_RM[r, m], length_RM[r, m], source_RM[r, m] = begin, size, row
                for theirs, ours in by_token.values():
                    ours[r, begin:end] = theirs[row, :size]
    source_B = source_RM.reshape(-1)

    def of_response(x: np.ndarray) -> np.ndarray:
        there = (source_B >= 0).reshape(-1, *[1] * (x.ndim - 1))
        return np.where(there, x[source_B], np.zeros((), x.dtype))

    return dataclasses.replace(
        batch,
        tokens_BS=tokens_RS,
        start_B=start_R,
        advantage_B=of_response(batch.advantage_B),
        length_BN=None if batch.length_BN is None else of_response(batch.length_BN),
        part_Bs=part_Rs,
        begin_B=begin_RM.reshape(-1),
        length_B=length_RM.reshape(-1),
        used_Z=np.array(used_Z, np.int32),
        **{name: ours for name, (_, ours) in by_token.items()},
    )


def unpack(rows: LearnerBatch, *arrays: Array) -> tuple[LearnerBatch, tuple[Any, ...]]:
    """A microbatch on a device, and arrays [R, s] of its tokens, with a row for each response:
    [B, s]. Rows that are not packed, as they are."""
    if rows.part_Bs is None:
        return rows, arrays
    with jax.named_scope("packing"):
        return _unpack(rows, *arrays)


def _unpack(rows: LearnerBatch, *arrays: Array) -> tuple[LearnerBatch, tuple[Any, ...]]:
    R, columns = rows.part_Bs.shape
    column_s = jnp.arange(columns)
    column_RMs = rows.begin_B.reshape(R, -1)[..., None] + column_s[None, None]
    column_RMs = jnp.minimum(column_RMs, columns - 1)
    mask_Bs = column_s[None] < rows.length_B[:, None]

    def each(x_Rs):
        if x_Rs is None:
            return None
        x_RMs = jnp.take_along_axis(x_Rs[:, None], column_RMs, axis=2)
        return jnp.where(mask_Bs, x_RMs.reshape(mask_Bs.shape), 0)

    rows = dataclasses.replace(
        rows,
        mask_BT=mask_Bs,
        sampler_logp_BT=each(rows.sampler_logp_BT),
        drawn_logp_BT=each(rows.drawn_logp_BT),
        ref_logp_BT=each(rows.ref_logp_BT),
        old_logp_BT=each(rows.old_logp_BT),
    )
    return rows, tuple(map(each, arrays))
