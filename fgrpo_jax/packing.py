"""So that little padding is computed: responses of a group packed into rows behind one prompt, or
microbatches of rows of like length.

R packed rows    C prompt columns    S = C + s columns    M responses in a row at most
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


def first_fit(length_M: np.ndarray, columns: int) -> list[list[int]]:
    """Which responses share a row: the longest first, each into the first row that has room.
    Responses of no tokens are in none."""
    rows: list[list[int]] = []
    room: list[int] = []
    for response in np.argsort(-length_M, kind="stable"):
        size = int(length_M[response])
        if not size:
            break
        row = next((row for row, left in enumerate(room) if left >= size), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(columns)
        rows[row].append(int(response))
        room[row] -= size
    return rows


def pack(
    batch: LearnerBatch, samples: int, minibatches: int, micro_rows: int, columns: int
) -> LearnerBatch:
    """The rows of this host packed: fewer rows, each of a prompt and several of its responses.

    Args:
        batch: rows of prompt and response on the host; those of a prompt are adjacent.
        samples: rows that have one prompt, M.
        minibatches: each of as many prompts, one after the other.
        micro_rows: packed rows of this host in a microbatch.
        columns: s, response columns of a packed row, at least the longest response.

    Returns:
        minibatches * microbatches * micro_rows packed rows: what is by token has shape [R, s],
        what is by response [R * M]. Of each minibatch the first used_Z microbatches hold all
        responses, on every host.
    """
    rows, T = batch.mask_BT.shape
    C = batch.tokens_BS.shape[1] - T
    length_PM = batch.mask_BT.sum(axis=1).reshape(-1, samples)
    groups = np.array_split(np.arange(len(length_PM)), minibatches)
    # a row of the result: (its prompt, the responses in it)
    packed = [
        [(p, responses) for p in group for responses in first_fit(length_PM[p], columns)]
        for group in groups
    ]
    most = -(-rows // minibatches // micro_rows) * micro_rows  # if every response had a row
    used_Z = [
        max(1, int(distributed.largest(-(-len(minibatch) // micro_rows)))) for minibatch in packed
    ]
    R = minibatches * most
    tokens_RS = np.zeros((R, C + columns), np.int32)
    start_R = np.full(R, C, np.int32)
    part_Rs = np.zeros((R, columns), np.int32)
    begin_RM, length_RM = np.zeros((2, R, samples), np.int32)
    source_RM = np.full((R, samples), -1)  # row of the batch
    by_token = {
        name: (x, np.zeros((R, columns), x.dtype))
        for name in BY_TOKEN
        if (x := getattr(batch, name)) is not None
    }
    for z, minibatch in enumerate(packed):
        for r, (p, responses) in enumerate(minibatch, z * most):
            first = p * samples
            tokens_RS[r, :C], start_R[r] = batch.tokens_BS[first, :C], batch.start_B[first]
            end = 0
            for m, response in enumerate(responses):
                row, begin, size = first + response, end, int(length_PM[p, response])
                end = begin + size
                tokens_RS[r, C + begin : C + end] = batch.tokens_BS[row, C : C + size]
                part_Rs[r, begin:end] = m + 1
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
