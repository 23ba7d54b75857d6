"""One layer of Qwen2.5, Qwen3 or Llama, of the shape that config.json gives.

Linen used thinly: explicit names in Hugging Face's order, and a weight in Hugging Face's
[out, in] order, which is also how einsum takes it.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from fgrpo_jax.adapters import EQUATIONS, equations
from fgrpo_jax.attention import causal_attention, decode_attention
from fgrpo_jax.model_config import ModelConfig
from fgrpo_jax.products import product
from fgrpo_jax.sharding import constrain

MULTIPLIED = "multiplied"  # checkpoint_name of products with weights


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
    def __call__(self, x: Array) -> Array:
        weight = self.param("weight", nn.initializers.ones, x.shape[-1:])
        x32 = x.astype(jnp.float32)
        x32 *= jax.lax.rsqrt((x32**2).mean(axis=-1, keepdims=True) + self.eps)
        return jnp.expand_dims(weight.astype(x.dtype), tuple(range(x.ndim - 1))) * x32.astype(
            x.dtype
        )


Turn = tuple[Array, Array]  # sine and cosine of rotary position embedding, [B T 1 H/2] each


def make_turn(position_BT: Array, config: ModelConfig) -> Turn:
    frequency_H = jnp.array(config.frequencies(), jnp.float32)
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
        rank = 2 if c.bias else 0
        q = Linear(q_shape, rank, name="q_proj")(x_BTD)
        k = Linear(kv_shape, rank, name="k_proj")(x_BTD)
        v = Linear(kv_shape, rank, name="v_proj")(x_BTD)
        if c.qk_norm:
            q = RMSNorm(c.rms_eps, name="q_norm")(q)
            k = RMSNorm(c.rms_eps, name="k_norm")(k)
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
