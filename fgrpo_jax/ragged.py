"""A Pallas TPU kernel of decode attention that reads of each row only the columns it needs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from fgrpo_jax.numerics import MASKED

LANES = 128  # of a TPU register: sizes along it are padded to a multiple
CACHE_BLOCK = 2**18  # bytes of keys a grid step reads, about; the same of values
INTERPRET: Any = False  # tests run the kernel on a CPU by setting this


def decode(q_BQH, own_k_BKH, own_v_BKH, k_LBKSH, v_LBKSH, layer, start_B, column):
    (B, Q, H), (_, _, K, S, _) = q_BQH.shape, k_LBKSH.shape
    G, column_bytes = Q // K, K * H * k_LBKSH.dtype.itemsize
    block = min(S, max(CACHE_BLOCK // column_bytes // LANES, 1) * LANES)
    axes, block_shape = "KSH", (K, block, H)
    if H % LANES:  # XLA keeps such a cache with S in the lanes: this copies nothing
        axes, block_shape = "KHS", (K, H, block)
        k_LBKSH, v_LBKSH = k_LBKSH.swapaxes(3, 4), v_LBKSH.swapaxes(3, 4)

    def cached(b, s, layer_1, start_B, column_1):
        # blocks outside the row's range repeat its first or last one, which costs no read
        last = jnp.maximum(column_1[0] - 1, 0) // block
        s = jnp.clip(s, start_B[b] // block, last)
        return (layer_1[0], b, *({"K": 0, "S": s, "H": 0}[axis] for axis in axes))

    row = lambda *shape: pl.BlockSpec((None, *shape), lambda b, *_: (b, 0, 0, 0))
    cache = pl.BlockSpec((None, None, *block_shape), cached)
    out_BKGH = pl.pallas_call(
        functools.partial(_ragged_kernel, axes=axes, block=block),
        out_shape=jax.ShapeDtypeStruct((B, K, G, H), q_BQH.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(B, pl.cdiv(S, block)),
            in_specs=[row(K, G, H), row(K, 1, H), row(K, 1, H), cache, cache],
            out_specs=row(K, G, H),
            scratch_shapes=[pltpu.VMEM((K, G, X), jnp.float32) for X in (1, 1, H)],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=INTERPRET,
        name="ragged_decode",
    )(
        *(layer.reshape(1), start_B, column.reshape(1), q_BQH.reshape(B, K, G, H)),
        *(own_k_BKH[:, :, None], own_v_BKH[:, :, None], k_LBKSH, v_LBKSH),
    )
    return out_BKGH.reshape(B, Q, H)


def _ragged_kernel(
    layer_1, start_B, column_1, q_KGH, own_k_K1H, own_v_K1H, k_ref, v_ref, out_KGH,
    max_KG1, sum_KG1, acc_KGH, *, axes, block,
):  # fmt: skip
    """A step of the online softmax: one row, all its heads, `block` cached columns.

    axes: those of the cache, "KSH" or "KHS".
    """
    del layer_1  # only says where the cache blocks are
    b, s = pl.program_id(0), pl.program_id(1)
    start, column = start_B[b], column_1[0]
    scale = q_KGH.shape[-1] ** -0.5

    @pl.when(s == 0)
    def _():  # the new token sees itself
        product_KGH = q_KGH[...].astype(jnp.float32) * own_k_K1H[...].astype(jnp.float32)
        max_KG1[...] = product_KGH.sum(axis=-1, keepdims=True) * scale
        sum_KG1[...] = jnp.ones_like(sum_KG1)
        acc_KGH[...] = jnp.broadcast_to(own_v_K1H[...].astype(jnp.float32), acc_KGH.shape)

    @pl.when((s * block < column) & ((s + 1) * block > start))
    def _():
        def seen(shape, axis):
            column_S = s * block + jax.lax.broadcasted_iota(jnp.int32, shape, axis)
            return (column_S >= start) & (column_S < column)

        score_KGS = jnp.einsum(
            f"KGH,{axes}->KGS", q_KGH[...], k_ref[...], preferred_element_type=jnp.float32
        )
        score_KGS = jnp.where(seen(score_KGS.shape, 2), score_KGS * scale, MASKED)
        top_KG1 = jnp.maximum(max_KG1[...], score_KGS.max(axis=-1, keepdims=True))
        weight_KGS = jnp.exp(score_KGS - top_KG1)
        shrink_KG1 = jnp.exp(max_KG1[...] - top_KG1)
        # past the end of the cache a block holds anything, NaN too, and 0 * NaN is NaN
        value = jnp.where(seen(v_ref.shape, axes.index("S")), v_ref[...], jnp.zeros_like(v_ref))
        max_KG1[...] = top_KG1
        sum_KG1[...] = sum_KG1[...] * shrink_KG1 + weight_KGS.sum(axis=-1, keepdims=True)
        acc_KGH[...] = acc_KGH[...] * shrink_KG1 + jnp.einsum(
            f"KGS,{axes}->KGH",
            weight_KGS.astype(value.dtype),
            value,
            preferred_element_type=jnp.float32,
        )

    @pl.when(s == pl.num_programs(1) - 1)
    def _():
        out_KGH[...] = (acc_KGH[...] / sum_KG1[...]).astype(out_KGH.dtype)
