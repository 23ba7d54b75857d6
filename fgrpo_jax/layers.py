"""One Qwen2.5 layer, of the shape that config.json gives.

Linen used thinly: explicit names in Hugging Face's order, and a weight in Hugging Face's
[out, in] order, which is also how einsum takes it.
"""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from fgrpo_jax import UserError
from fgrpo_jax.adapters import EQUATIONS, equations
from fgrpo_jax.attention import causal_attention, decode_attention
from fgrpo_jax.products import product
from fgrpo_jax.sharding import constrain

LARGEST = {  # of config.json's sizes that are believed, before anything is made of them
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 18,
    "intermediate_size": 1 << 20,
    "num_hidden_layers": 1000,
    "num_attention_heads": 1 << 12,
    "num_key_value_heads": 1 << 12,
    "head_dim": 1 << 12,
}
MULTIPLIED = "multiplied"  # checkpoint_name of products with weights


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

    def column_bytes(self, itemsize: int, tp: int = 1) -> int:
        """Of a column's keys and values in all layers, on one of tp devices."""
        return 2 * self.layers * -(-self.kv_heads // tp) * self.head_size * itemsize

    @property
    def layer_matrices(self) -> int:
        """Entries of one layer's weights that are multiplied by."""
        heads = self.width * self.head_size * (2 * self.heads + 2 * self.kv_heads)
        return heads + 3 * self.width * self.feed_forward

    @classmethod
    def from_hugging_face(cls, c: dict[str, Any], file: str = "config.json") -> "ModelConfig":
        """From the content of a config.json; UserError on what this policy does not compute."""

        def size(key: str, default: int | None = None) -> int:
            value = default if c.get(key) is None else c[key]
            if value is None:
                raise UserError(f"{file} has no {key}")
            if type(value) is not int or not 1 <= value <= LARGEST[key]:
                raise UserError(
                    f"{file} has {key} {value!r:.40}: it must be a whole number from 1 to "
                    f"{LARGEST[key]}"
                )
            return value

        def number(key: str, value: Any) -> float:
            if type(value) not in (int, float) or not 0 < value < 1e12:
                raise UserError(f"{file} has {key} {value!r:.40}: it must be a number above 0")
            return float(value)

        if c.get("model_type") != "qwen2":
            raise UserError(f"{file} has model_type {c.get('model_type')!r:.40}: it must be qwen2")
        if c.get("use_sliding_window"):
            raise UserError(f"{file} has use_sliding_window true: it is not supported")
        if c.get("hidden_act", "silu") != "silu":
            raise UserError(f"{file} has hidden_act {c['hidden_act']!r:.40}: it must be silu")
        rope = c.get("rope_parameters") or c.get("rope_scaling") or {}
        if not isinstance(rope, dict) or rope.get("rope_type", rope.get("type", "default")) != (
            "default"
        ):
            raise UserError(f"{file} scales RoPE: only the default rotation is supported")
        tied = c.get("tie_word_embeddings", False)
        if not isinstance(tied, bool):
            raise UserError(
                f"{file} has tie_word_embeddings {tied!r:.40}: it must be true or false"
            )
        width, heads = size("hidden_size"), size("num_attention_heads")
        kv_heads = size("num_key_value_heads", heads)
        if heads % kv_heads or (c.get("head_dim") is None and width % heads):
            raise UserError(
                f"{file} has hidden_size {width}, num_attention_heads {heads} and "
                f"num_key_value_heads {kv_heads}: each must be a multiple of the next"
            )
        head_size = size("head_dim", width // heads)
        if head_size % 2:
            raise UserError(
                f"{file} has heads of size {head_size}: RoPE turns pairs, so it is even"
            )
        return cls(
            vocab=size("vocab_size"),
            width=width,
            layers=size("num_hidden_layers"),
            heads=heads,
            kv_heads=kv_heads,
            head_size=head_size,
            feed_forward=size("intermediate_size"),
            rope_theta=number("rope_theta", c.get("rope_theta", rope.get("rope_theta", 10_000.0))),
            rms_eps=number("rms_norm_eps", c.get("rms_norm_eps", 1e-6)),
            tied=tied,
        )


@struct.dataclass
class Past:
    """Keys and values of columns before the new tokens, which a layer only reads.

    While decoding they are the cache's columns before `column`, all in its first `width`; width
    None: all columns here, and the new tokens follow them.
    """

    k_LBKSH: Any
    v_LBKSH: Any
    layer: Any  # of the L here
    column: Any = None
    width: int | None = struct.field(pytree_node=False, default=None)


def multiply(equation: str, x: Array, weight: Array, dtype: Any = None) -> Array:
    """products.product of an activation "B..." and a weight.

    A CPU multiplies the few rows of a decode step fastest with the weight first, which XLA would
    undo but for the barrier.
    """
    plain = functools.partial(jnp.einsum, equation, preferred_element_type=dtype)

    def weight_first(x: Array, weight: Array) -> Array:
        inputs, out = equation.split("->")
        rows = next(n for n in range(len(out)) if out[n] not in inputs.split(",")[0])
        turned = f"{','.join(inputs.split(',')[::-1])}->{out[rows:]}{out[:rows]}"
        y = jnp.einsum(turned, weight, x, preferred_element_type=dtype)
        y = jax.lax.optimization_barrier(y)
        return jnp.moveaxis(y, range(-rows, 0), range(rows))

    if x.ndim > 2 and x.shape[1] > 1:  # whole rows
        return checkpoint_name(product(equation, x, weight, dtype), MULTIPLIED)
    return jax.lax.platform_dependent(x, weight, cpu=weight_first, default=plain)


class Linear(nn.Module):
    """The product with the matrix of its name, and with an adapter where it has one."""

    shape: tuple[int, ...]
    bias_rank: int = 0  # leading axes of the weight that are outputs, where there is a bias

    @nn.compact
    def __call__(self, x: Array) -> Array:
        assert self.name
        weight = self.param("weight", nn.initializers.normal(0.02), self.shape)
        y = multiply(EQUATIONS[self.name], x, weight.astype(x.dtype))
        if self.has_variable("params", "lora_A"):
            first, second, _ = equations(self.name)
            lora = lambda name: self.get_variable("params", name).astype(x.dtype)
            y += multiply(second, multiply(first, x, lora("lora_A")), lora("lora_B"))
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


Turn = tuple[Array, Array]  # sine and cosine of rotary position embedding, [B T 1 H/2] each


def make_turn(position_BT: Array, head_size: int, theta: float) -> Turn:
    half = head_size // 2
    frequency_H = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    # bfloat16 would round position 257 to 256
    angle = position_BT.astype(jnp.float32)[..., None, None] * frequency_H[None, None, None]
    return jnp.sin(angle), jnp.cos(angle)


def rotate(x_BTXH: Array, turn: Turn) -> Array:
    """Halves rotated as Hugging Face does; X heads of either kind."""
    sin, cos = turn
    a, b = jnp.split(x_BTXH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x_BTXH.dtype)


class Attention(nn.Module):
    config: ModelConfig
    backends: tuple[str, str]

    @nn.compact
    def __call__(self, x_BTD, turn, start_B, past: Past | None, part_BT):
        c = self.config
        whole, one = self.backends
        q_shape = (c.heads, c.head_size, c.width)
        kv_shape = (c.kv_heads, c.head_size, c.width)
        q = Linear(q_shape, 2, name="q_proj")(x_BTD)
        k = Linear(kv_shape, 2, name="k_proj")(x_BTD)
        v = Linear(kv_shape, 2, name="v_proj")(x_BTD)
        q_BTQH = constrain(rotate(q, turn), "BTQH")
        k_BKTH = constrain(rotate(k, turn).swapaxes(1, 2), "BKSH")
        v_BKTH = constrain(v.swapaxes(1, 2), "BKSH")
        if past is None:
            out_BTQH = causal_attention(q_BTQH, k_BKTH, v_BKTH, start_B, whole, part_BT)
        elif past.width is None:
            k_BKSH = jnp.concatenate([past.k_LBKSH[past.layer], k_BKTH], axis=2)
            v_BKSH = jnp.concatenate([past.v_LBKSH[past.layer], v_BKTH], axis=2)
            out_BTQH = causal_attention(q_BTQH, k_BKSH, v_BKSH, start_B, whole, part_BT)
        else:  # Policy.decode writes the new rows
            out_BQH = decode_attention(
                q_BTQH[:, 0], k_BKTH[:, :, 0], v_BKTH[:, :, 0], past.k_LBKSH, past.v_LBKSH,
                past.layer, start_B, past.column, past.width, one,
            )  # fmt: skip
            out_BTQH = out_BQH[:, None]
        o_shape = (c.width, c.heads, c.head_size)
        out_BTD = Linear(o_shape, name="o_proj")(constrain(out_BTQH, "BTQH"))
        return out_BTD, (k_BKTH, v_BKTH)


class MLP(nn.Module):
    config: ModelConfig

    @nn.compact
    def __call__(self, x_BTD):
        c = self.config
        gate = Linear((c.feed_forward, c.width), name="gate_proj")(x_BTD)
        up = Linear((c.feed_forward, c.width), name="up_proj")(x_BTD)
        # the backward pass makes it again: a layer then keeps gate and up alone
        hidden = jax.checkpoint(lambda gate, up: nn.silu(gate) * up, prevent_cse=False)(gate, up)
        hidden_BTF = constrain(hidden, "BTF")
        return Linear((c.width, c.feed_forward), name="down_proj")(hidden_BTF)


class Layer(nn.Module):
    """Hidden states in and out; also the layer's new keys and values [B K T H]."""

    config: ModelConfig
    backends: tuple[str, str]
    stream: str  # how hidden states lie between layers, by sharding's name

    @nn.compact
    def __call__(self, x_BTD, turn, start_B, past: Past | None, part_BT=None):
        c = self.config
        h = RMSNorm(c.rms_eps, name="input_layernorm")(x_BTD)
        h = constrain(h, "BTD")
        h, rows = Attention(c, self.backends, name="self_attn")(h, turn, start_B, past, part_BT)
        x_BTD = constrain(x_BTD + h, self.stream)
        h = RMSNorm(c.rms_eps, name="post_attention_layernorm")(x_BTD)
        h = constrain(h, "BTD")
        return constrain(x_BTD + MLP(c, name="mlp")(h), self.stream), rows
