"""The Qwen2.5 policy: params, tokens and cache in; hidden states, logits and cache rows out.

Linen used thinly: explicit names in Hugging Face's order, layers stacked and scanned, a weight
in Hugging Face's [out, in] order, which is also how einsum takes it. Everything outside sees
Policy's functions of params.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from fgrpo_jax import UserError
from fgrpo_jax.sharding import constrain

MASKED = -1e30  # finite, so that a row with no key at all gives no NaN


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The shape of a Qwen2 model."""

    vocab: int  # V, rows of the embedding
    width: int  # D
    layers: int  # L
    heads: int  # Q
    kv_heads: int  # K
    head_size: int  # H
    feed_forward: int  # F
    rope_theta: float
    rms_eps: float
    tied: bool  # the embedding is the head

    @classmethod
    def from_hugging_face(cls, c: dict[str, Any]) -> "ModelConfig":
        """From the content of a config.json; UserError on what this policy does not compute."""
        if c.get("model_type") != "qwen2":
            raise UserError(f"config.json has model_type {c.get('model_type')!r}: it must be qwen2")
        if c.get("use_sliding_window"):
            raise UserError("config.json has use_sliding_window true: it is not supported")
        if c.get("hidden_act", "silu") != "silu":
            raise UserError(f"config.json has hidden_act {c['hidden_act']!r}: it must be silu")
        rope = c.get("rope_parameters") or c.get("rope_scaling") or {}
        if rope.get("rope_type", rope.get("type", "default")) != "default":
            raise UserError("config.json scales RoPE: only the default rotation is supported")
        theta = c.get("rope_theta", rope.get("rope_theta", 10_000.0))
        try:
            heads = c["num_attention_heads"]
            return cls(
                vocab=c["vocab_size"],
                width=c["hidden_size"],
                layers=c["num_hidden_layers"],
                heads=heads,
                kv_heads=c.get("num_key_value_heads", heads),
                head_size=c.get("head_dim") or c["hidden_size"] // heads,
                feed_forward=c["intermediate_size"],
                rope_theta=float(theta),
                rms_eps=c.get("rms_norm_eps", 1e-6),
                tied=c.get("tie_word_embeddings", False),
            )
        except KeyError as error:
            raise UserError(f"config.json has no {error.args[0]}") from None


@struct.dataclass
class Cache:
    """Keys and values of columns 0 .. S - 1; keys are rotated."""

    k_LBKSH: Any
    v_LBKSH: Any


class Linear(nn.Module):
    equation: str  # of input and weight
    shape: tuple[int, ...]
    bias_rank: int = 0  # leading axes of the weight that are outputs, where there is a bias

    @nn.compact
    def __call__(self, x: Array) -> Array:
        weight = self.param("weight", nn.initializers.normal(0.02), self.shape)
        y = jnp.einsum(self.equation, x, weight.astype(x.dtype))
        if self.bias_rank:
            bias = self.param("bias", nn.initializers.zeros, self.shape[: self.bias_rank])
            y += jnp.expand_dims(bias.astype(x.dtype), tuple(range(y.ndim - bias.ndim)))
        return y


class RMSNorm(nn.Module):
    eps: float

    @nn.compact
    def __call__(self, x_BTD: Array) -> Array:
        weight_D = self.param("weight", nn.initializers.ones, x_BTD.shape[-1:])
        x32 = x_BTD.astype(jnp.float32)
        x32 *= jax.lax.rsqrt((x32**2).mean(axis=-1, keepdims=True) + self.eps)
        return weight_D.astype(x_BTD.dtype)[None, None] * x32.astype(x_BTD.dtype)


def rotate(x_BTXH: Array, position_BT: Array, theta: float) -> Array:
    """Rotary position embedding, halves rotated as Hugging Face does; X heads of either kind."""
    half = x_BTXH.shape[-1] // 2
    frequency_H = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    # bfloat16 would round position 257 to 256
    angle = position_BT.astype(jnp.float32)[..., None, None] * frequency_H[None, None, None]
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    a, b = jnp.split(x_BTXH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x_BTXH.dtype)


def attend(q_BTQH: Array, sources: list[tuple[Array, Array, Array]]) -> Array:
    """Softmax attention over the union of the keys of several sources, none of them copied.

    Each source is (keys [B K S H], values [B K S H], mask [B T S]).
    """
    B, T, Q, H = q_BTQH.shape
    K = sources[0][0].shape[1]
    q_BTKGH = q_BTQH.reshape(B, T, K, Q // K, H)
    scores = []
    for k_BKSH, _, mask_BTS in sources:
        score_BKGTS = jnp.einsum(
            "BTKGH,BKSH->BKGTS", q_BTKGH, k_BKSH, preferred_element_type=jnp.float32
        )
        scores.append(jnp.where(mask_BTS[:, None, None], score_BKGTS * H**-0.5, MASKED))
    weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1).astype(q_BTQH.dtype)
    out, start = jnp.zeros_like(q_BTKGH), 0
    for _, v_BKSH, _ in sources:
        part = jax.lax.slice_in_dim(weights, start, start + v_BKSH.shape[2], axis=-1)
        out += jnp.einsum("BKGTS,BKSH->BTKGH", part, v_BKSH)
        start += v_BKSH.shape[2]
    return out.reshape(B, T, Q, H)


class Attention(nn.Module):
    config: ModelConfig

    @nn.compact
    def __call__(self, x_BTD, cached, position_BT, masks):
        c = self.config
        q_shape = (c.heads, c.head_size, c.width)
        kv_shape = (c.kv_heads, c.head_size, c.width)
        q = Linear("BTD,QHD->BTQH", q_shape, 2, name="q_proj")(x_BTD)
        k = Linear("BTD,KHD->BTKH", kv_shape, 2, name="k_proj")(x_BTD)
        v = Linear("BTD,KHD->BTKH", kv_shape, 2, name="v_proj")(x_BTD)
        q = constrain(rotate(q, position_BT, c.rope_theta), "BTQH")
        k_BKTH = constrain(rotate(k, position_BT, c.rope_theta).swapaxes(1, 2), "BKSH")
        v_BKTH = constrain(v.swapaxes(1, 2), "BKSH")
        own_mask, cached_mask = masks
        sources = [(k_BKTH, v_BKTH, own_mask)]
        if cached is not None:  # only read here; Policy.decode writes the new rows
            sources.append((*cached, cached_mask))
        out_BTQH = constrain(attend(q, sources), "BTQH")
        o_shape = (c.width, c.heads, c.head_size)
        out_BTD = Linear("BTQH,DQH->BTD", o_shape, name="o_proj")(out_BTQH)
        return out_BTD, (k_BKTH, v_BKTH)


class MLP(nn.Module):
    config: ModelConfig

    @nn.compact
    def __call__(self, x_BTD):
        c = self.config
        gate = Linear("BTD,FD->BTF", (c.feed_forward, c.width), name="gate_proj")(x_BTD)
        up = Linear("BTD,FD->BTF", (c.feed_forward, c.width), name="up_proj")(x_BTD)
        hidden_BTF = constrain(nn.silu(gate) * up, "BTF")
        return Linear("BTF,DF->BTD", (c.width, c.feed_forward), name="down_proj")(hidden_BTF)


class Layer(nn.Module):
    config: ModelConfig
    keep_rows: bool  # whether new cache rows are wanted

    @nn.compact
    def __call__(self, x_BTD, cached, position_BT, masks):
        c = self.config
        h = RMSNorm(c.rms_eps, name="input_layernorm")(x_BTD)
        h, rows = Attention(c, name="self_attn")(h, cached, position_BT, masks)
        x_BTD = constrain(x_BTD + h, "BTD")
        h = RMSNorm(c.rms_eps, name="post_attention_layernorm")(x_BTD)
        x_BTD = constrain(x_BTD + MLP(c, name="mlp")(h), "BTD")
        return x_BTD, (rows if self.keep_rows else None)


class Embedding(nn.Module):
    shape: tuple[int, int]

    @nn.compact
    def __call__(self) -> Array:
        return self.param("weight", nn.initializers.normal(0.02), self.shape)


class Qwen2(nn.Module):
    """Tokens to normalised hidden states, and the new cache rows."""

    config: ModelConfig
    dtype: Any
    remat: bool
    keep_rows: bool

    @nn.compact
    def __call__(self, token_BT, cached, position_BT, masks):
        c = self.config
        weight_VD = Embedding((c.vocab, c.width), name="embed_tokens")()
        x_BTD = constrain(weight_VD[token_BT].astype(self.dtype), "BTD")
        layer: Any = nn.remat(Layer, prevent_cse=False) if self.remat else Layer
        x_BTD, rows = nn.scan(
            layer,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=(0, nn.broadcast, nn.broadcast),  # pyright: ignore[reportArgumentType]
            length=c.layers,
        )(c, self.keep_rows, name="layers")(x_BTD, cached, position_BT, masks)
        x_BTD = RMSNorm(c.rms_eps, name="norm")(x_BTD)
        if not c.tied:
            Embedding((c.vocab, c.width), name="lm_head")()
        return x_BTD, rows


@dataclasses.dataclass(frozen=True)
class Policy:
    """The language model as functions of params.

    Rows are left-padded: `start_B` is the column of a row's first real token, and column j holds
    position j - start.
    """

    config: ModelConfig
    dtype: Any = jnp.float32  # of computation; norms, softmax, RoPE and logits are float32
    remat: bool = False  # recompute each layer in the backward pass
    tokens: int | None = None  # ids that the tokenizer knows; the rows above are never sampled

    def init(self, key: Array) -> Any:
        """Random float32 parameters."""
        token = jnp.zeros((1, 1), jnp.int32)
        module = Qwen2(self.config, self.dtype, self.remat, keep_rows=False)
        mask = jnp.ones((1, 1, 1), bool)
        return module.init(key, token, None, token, (mask, None))["params"]

    def hidden(
        self, params: Any, token_BT: Int[Array, "B T"], start_B: Int[Array, " B"]
    ) -> Float[Array, "B T D"]:
        """Final hidden states of whole rows."""
        return self._forward(params, token_BT, start_B, 0, None, keep_rows=False)[0]

    def prefill(
        self, params: Any, token_BT: Int[Array, "B T"], start_B: Int[Array, " B"]
    ) -> tuple[Float[Array, "B T D"], Cache]:
        """The same, with the cache of these T columns."""
        hidden_BTD, rows = self._forward(params, token_BT, start_B, 0, None, keep_rows=True)
        return hidden_BTD, Cache(*rows)

    def decode(
        self,
        params: Any,
        token_B: Int[Array, " B"],
        start_B: Int[Array, " B"],
        column: Int[Array, ""],
        cache: Cache,
    ) -> tuple[Float[Array, "B D"], Cache]:
        """One token a row at `column`, reading the cache before it; returns the cache with its
        row written. One write after the layer scan: carrying the cache through the scan would
        copy all of it every token."""
        hidden_BTD, (k_LBK1H, v_LBK1H) = self._forward(
            params, token_B[:, None], start_B, column, cache, keep_rows=True
        )
        write = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=column, axis=3)
        return hidden_BTD[:, 0], Cache(write(cache.k_LBKSH, k_LBK1H), write(cache.v_LBKSH, v_LBK1H))

    def _forward(self, params, token_BT, start_B, column, cache, keep_rows) -> tuple[Array, Any]:
        column_T = column + jnp.arange(token_BT.shape[1])
        own_BTT = (column_T[None, None] <= column_T[None, :, None]) & (
            column_T[None, None] >= start_B[:, None, None]
        )
        cached_BTS = None
        if cache is not None:
            column_S = jnp.arange(cache.k_LBKSH.shape[3])
            seen_BS = (column_S[None] >= start_B[:, None]) & (column_S < column)[None]
            cached_BTS = jnp.broadcast_to(seen_BS[:, None], (*token_BT.shape, column_S.shape[0]))
        position_BT = jnp.maximum(column_T[None] - start_B[:, None], 0)
        module = Qwen2(self.config, self.dtype, self.remat, keep_rows)
        cached = None if cache is None else (cache.k_LBKSH, cache.v_LBKSH)
        return module.apply(  # pyright: ignore[reportReturnType]
            {"params": params}, token_BT, cached, position_BT, (own_BTT, cached_BTS)
        )

    def logits(self, params: Any, hidden: Array, temperature: float) -> Array:
        """float32 logits [..., V] of hidden states [..., D], divided by a temperature above 0.

        Rows that the tokenizer does not know are masked, here and so in sampling and training.
        """
        c = self.config
        weight_VD = params["embed_tokens" if c.tied else "lm_head"]["weight"]
        logits = jnp.einsum(
            "...D,VD->...V",
            hidden,
            weight_VD.astype(hidden.dtype),
            preferred_element_type=jnp.float32,
        )
        logits = constrain(logits, "BTV" if logits.ndim == 3 else "BV") / temperature
        if self.tokens is None or self.tokens >= c.vocab:
            return logits
        known_V = jnp.arange(c.vocab) < self.tokens
        return jnp.where(jnp.expand_dims(known_V, tuple(range(logits.ndim - 1))), logits, MASKED)


DTYPES: dict[str, Callable[[], Any]] = {
    "float32": lambda: jnp.float32,
    "bfloat16": lambda: jnp.bfloat16,
    "auto": lambda: jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16,
}
