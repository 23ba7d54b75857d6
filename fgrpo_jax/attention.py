"""Softmax attention of grouped queries over left-padded rows, on every backend.

    B rows         Q query heads          T query columns
    H head size    K key/value heads      S key columns
    L layers       G = Q / K, the query heads of a key head; keys are never expanded to Q

`causal_attention` takes whole rows (training, prefill), `decode_attention` one new token a row
over the cache. Row b starts at column start_B[b]; what lies before it is padding.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask
from jaxtyping import Array, Float, Int

from fgrpo_jax import UserError, ragged, sharding
from fgrpo_jax.numerics import MASKED
from fgrpo_jax.products import product
from fgrpo_jax.ragged import LANES

ATTENTION = ("auto", "xla", "splash", "cudnn")  # the values of model.attention
SPLASH_BLOCK = 512  # columns, at most
KEPT = "attention"  # checkpoint_name of what a backward pass needs of causal_attention's forward


def resolve(
    attention: str, platform: str, dtype: Any, head_size: int, packed: bool = False
) -> tuple[str, str]:
    """The backends of (causal_attention, decode_attention) for the value of model.attention.

    platform: as jax.default_backend() names it. dtype: of computation. packed: whether rows are.
    Raises UserError where the attention that is named cannot run.
    """
    pairs = {"splash": ("splash", "ragged"), "cudnn": ("cudnn", "xla"), "xla": ("xla", "xla")}
    obstacle = functools.partial(
        _obstacle, platform=platform, dtype=jnp.dtype(dtype), head_size=head_size, packed=packed
    )
    if attention == "auto":
        return pairs[next(kernel for kernel in pairs if not obstacle(kernel))]
    if attention not in ATTENTION:
        raise UserError(
            f"model.attention is {attention!r}: it must be one of {', '.join(ATTENTION)}"
        )
    if why := obstacle(attention):
        raise UserError(f"model.attention is {attention!r}, which {why}: set it to auto or to xla")
    return pairs[attention]


def packs_whole(backend: str) -> bool:
    """Whether packed rows must hold sequences whole, each with its own prompt: the kernel knows
    segments that see nothing of each other, and no prompt that several of them see."""
    return backend == "splash"


def _obstacle(attention: str, platform: str, dtype: Any, head_size: int, packed: bool) -> str:
    """Why a kernel cannot run here; empty where it can."""
    if attention == "splash" and platform != "tpu":
        return f"needs a TPU and this is a {platform}"
    if attention == "splash" and head_size % 64:
        return f"takes head sizes that 64 divides and the model's is {head_size}"
    if attention == "cudnn" and platform not in ("gpu", "cuda"):
        return f"needs an NVIDIA GPU and this is a {platform}"
    if attention == "cudnn" and (head_size % 8 or head_size > 128):
        return f"takes head sizes up to 128 that 8 divides and the model's is {head_size}"
    if attention == "cudnn" and dtype not in (jnp.bfloat16, jnp.float16):
        return f"needs model.dtype bfloat16 and it is {dtype.name}"
    if attention == "cudnn" and packed:
        return "knows no packed rows, and learn.pack is set"
    return ""


def causal_attention(
    q_BTQH: Float[Array, "B T Q H"],
    k_BKSH: Float[Array, "B K S H"],
    v_BKSH: Float[Array, "B K S H"],
    start_B: Int[Array, " B"],
    backend: str,
    part_BT: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T Q H"]:
    """Attention of the last T of S columns: the query at column j sees columns start .. j.

    part_BT: of packed rows: of the last T columns it sees those of its own part, 0 being one too.
    "splash" takes it where T is S, and then reads no start; "cudnn" knows none.

    softmax(q kᵀ / √H) v, the softmax in float32. backend: "xla", "splash" (TPU) or "cudnn"
    (GPU). What comes out before a row's start is finite and means nothing: no loss may read it.
    """
    if backend == "xla":
        return checkpoint_name(_causal_xla(q_BTQH, k_BKSH, v_BKSH, start_B, part_BT), KEPT)
    S = k_BKSH.shape[2]
    if part_BT is not None and (backend != "splash" or part_BT.shape[1] != S):
        raise ValueError(f"attention {backend} knows no such packed rows")
    if backend == "splash":
        segment_BS = part_BT
        if segment_BS is None:  # padding is a segment of its own
            segment_BS = (jnp.arange(S)[None] >= start_B[:, None]).astype(jnp.int32)
        splash_local = sharding.local(_causal_splash, ("BTQH", "BKSH", "BKSH", "BT"), "BTQH")
        return splash_local(q_BTQH, k_BKSH, v_BKSH, segment_BS)
    cudnn = sharding.local(_causal_cudnn, ("BTQH", "BKSH", "BKSH", "B"), "BTQH")
    return checkpoint_name(cudnn(q_BTQH, k_BKSH, v_BKSH, start_B), KEPT)


def _causal_xla(q_BTQH, k_BKSH, v_BKSH, start_B, part_BT):
    column_S = jnp.arange(k_BKSH.shape[2])
    query_T = column_S[-q_BTQH.shape[1] :]
    causal_TS = column_S[None] <= query_T[:, None]
    mask_BTS = causal_TS[None] & (column_S[None, None] >= start_B[:, None, None])
    if part_BT is not None:
        same_BTT = part_BT[:, :, None] == part_BT[:, None, :]
        before = k_BKSH.shape[2] - q_BTQH.shape[1]
        mask_BTS &= jnp.pad(same_BTT, [(0, 0), (0, 0), (before, 0)], constant_values=True)
    (B, T, Q, H), (_, K, S, _) = q_BTQH.shape, k_BKSH.shape
    G = Q // K
    # U: the G x T queries of a key head, one axis, so that a CPU multiplies matrices as they lie
    q_BKUH = q_BTQH.reshape(B, T, K, G, H).transpose(0, 2, 3, 1, 4).reshape(B, K, G * T, H)
    score_BKUS = product("BKUH,BKSH->BKUS", q_BKUH, k_BKSH, jnp.float32)
    score_BKGTS = score_BKUS.reshape(B, K, G, T, S) * H**-0.5
    score_BKGTS = jnp.where(mask_BTS[:, None, None], score_BKGTS, MASKED)
    score_BKUS = score_BKGTS.reshape(B, K, G * T, S)
    top_BKU = jax.lax.stop_gradient(score_BKUS.max(axis=-1))
    weight_BKUS = jnp.exp(score_BKUS - top_BKU[..., None])
    weight_BKUS /= weight_BKUS.sum(axis=-1)[..., None]
    out_BKUH = product("BKUS,BKSH->BKUH", weight_BKUS.astype(q_BTQH.dtype), v_BKSH, jnp.float32)
    out_BKGTH = out_BKUH.astype(q_BTQH.dtype).reshape(B, K, G, T, H)
    return out_BKGTH.transpose(0, 3, 1, 2, 4).reshape(B, T, Q, H)


def _splash_block(columns: int) -> int:
    """The block of columns, a multiple of LANES, that pads little."""
    return LANES * pl.cdiv(pl.cdiv(columns, pl.cdiv(columns, SPLASH_BLOCK)), LANES)


def _causal_splash(q_BTQH, k_BKSH, v_BKSH, segment_BS):
    (B, T, Q, H), (_, K, S, _) = q_BTQH.shape, k_BKSH.shape
    G, block_T, block_S = Q // K, _splash_block(T), _splash_block(S)
    # more padding on the left makes both lengths whole blocks and leaves the queries last
    pad_T, pad_S = -T % block_T, -S % block_S
    whole_T, whole_S = T + pad_T, S + pad_S
    pad = lambda x, columns: jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(columns, 0), (0, 0)])
    scaled_BTQH = (q_BTQH.astype(jnp.float32) * H**-0.5).astype(q_BTQH.dtype)
    q_BKGTH = pad(scaled_BTQH.reshape(B, T, K, G, H).transpose(0, 2, 3, 1, 4), pad_T)
    k_BKSH, v_BKSH = pad(k_BKSH, pad_S), pad(v_BKSH, pad_S)
    # each column, this padding too, sees itself at least, so no softmax is empty
    segment_BS = jnp.pad(segment_BS, [(0, 0), (pad_S, 0)])
    segments = splash.SegmentIds(segment_BS[:, -whole_T:], segment_BS)
    causal = splash_attention_mask.CausalMask((whole_T, whole_S), offset=whole_S - whole_T)
    one_key_head = splash.make_splash_mqa(
        splash_attention_mask.MultiHeadMask([causal] * G),
        block_sizes=splash.BlockSizes(
            block_q=block_T, block_kv=block_S,
            block_q_dkv=block_T, block_kv_dkv=block_S,
            block_q_dq=block_T, block_kv_dq=block_S,
        ),
        head_shards=1,
        q_seq_shards=1,
        interpret=ragged.INTERPRET,
        residual_checkpoint_name=KEPT,
    )  # fmt: skip
    all_heads = jax.vmap(one_key_head, in_axes=(0, 0, 0, None))
    out_BKGTH = jnp.asarray(jax.vmap(all_heads)(q_BKGTH, k_BKSH, v_BKSH, segments))
    return out_BKGTH[:, :, :, pad_T:].transpose(0, 3, 1, 2, 4).reshape(B, T, Q, H)


@jax.custom_vjp
def _roll(x_BSXH, shift_B):
    """Column j of row b is column j + shift of x, cyclic; a gather's gradient would scatter."""
    S = x_BSXH.shape[1]
    column_BS = (jnp.arange(S)[None] + shift_B[:, None]) % S
    return jnp.take_along_axis(x_BSXH, column_BS[:, :, None, None], axis=1)


_roll.defvjp(
    lambda x_BSXH, shift_B: (_roll(x_BSXH, shift_B), shift_B),
    lambda shift_B, g_BSXH: (_roll(g_BSXH, -shift_B), None),
)


def _causal_cudnn(q_BTQH, k_BKSH, v_BKSH, start_B):
    """cuDNN aligns causality to the top left and would take left padding only as a whole bias
    [B T S]. Rows rolled to begin at column 0 need neither: their padding comes last, unseen."""
    pad_T = k_BKSH.shape[2] - q_BTQH.shape[1]
    q_BSQH = jnp.pad(q_BTQH, [(0, 0), (pad_T, 0), (0, 0), (0, 0)])
    q_BSQH, k_BSKH, v_BSKH = (
        _roll(x, start_B) for x in (q_BSQH, k_BKSH.swapaxes(1, 2), v_BKSH.swapaxes(1, 2))
    )
    out_BSQH = jax.nn.dot_product_attention(
        q_BSQH, k_BSKH, v_BSKH, is_causal=True, implementation="cudnn"
    )
    return _roll(out_BSQH, -start_B)[:, pad_T:]


def decode_attention(
    q_BQH: Float[Array, "B Q H"],
    own_k_BKH: Float[Array, "B K H"],
    own_v_BKH: Float[Array, "B K H"],
    k_LBKSH: Float[Array, "L B K S H"],
    v_LBKSH: Float[Array, "L B K S H"],
    layer: Int[Array, ""],
    start_B: Int[Array, " B"],
    column: Int[Array, ""],
    width: int,
    backend: str,
) -> Float[Array, "B Q H"]:
    """Attention of one new token a row: it sees itself and cached columns start .. column - 1.

    The cache holds all layers and is only read; the new key and value need not be in it yet.

    Args:
        width: the first so many columns of the cache hold all that is seen, and are read.
        backend: "xla", or "ragged" (TPU), which whatever the width reads no column outside
            start .. column - 1 but those of a block.
    """
    if backend == "xla":
        own = (own_k_BKH, own_v_BKH)
        return _decode_xla(q_BQH, *own, k_LBKSH, v_LBKSH, layer, start_B, column, width)
    kernel = {"ragged": ragged.decode}[backend]
    in_axes = ("BQH", "BKH", "BKH", "LBKSH", "LBKSH", "", "B", "")
    local = sharding.local(kernel, in_axes, "BQH")
    return local(q_BQH, own_k_BKH, own_v_BKH, k_LBKSH, v_LBKSH, layer, start_B, column)


def _decode_xla(
    q_BQH, own_k_BKH, own_v_BKH, k_LBKSH, v_LBKSH, layer, start_B, column, width
):  # fmt: skip
    (B, Q, H), K = q_BQH.shape, own_k_BKH.shape[1]

    def of_layer(x_LBKSH):  # in one cut, which XLA can fuse
        return jax.lax.dynamic_slice(x_LBKSH, (layer, 0, 0, 0, 0), (1, B, K, width, H))[0]

    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    q_BKGH = q_BQH.reshape(B, K, Q // K, H)
    score_BKGS = product("BKGH,BKSH->BKGS", q_BKGH, of_layer(k_LBKSH)) * H**-0.5
    column_S = jnp.arange(width)
    seen_BS = (column_S[None] >= start_B[:, None]) & (column_S < column)[None]
    score_BKGS = jnp.where(seen_BS[:, None, None], score_BKGS, MASKED)
    own_BKG = product("BKGH,BKH->BKG", q_BKGH, own_k_BKH) * H**-0.5
    # the softmax over both, put together: a concatenation would copy the scores
    top_BKG = jnp.maximum(score_BKGS.max(axis=-1), own_BKG)
    weight_BKGS = jnp.exp(score_BKGS - top_BKG[..., None])
    own_BKG = jnp.exp(own_BKG - top_BKG)
    out_BKGH = product("BKGS,BKSH->BKGH", weight_BKGS.astype(q_BQH.dtype), of_layer(v_LBKSH))
    out_BKGH += own_BKG[..., None] * own_v_BKH.astype(jnp.float32)[:, :, None]
    out_BKGH /= (weight_BKGS.sum(axis=-1) + own_BKG)[..., None]
    return out_BKGH.astype(q_BQH.dtype).reshape(B, Q, H)
