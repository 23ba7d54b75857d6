"""Products of activations, and their gradients in the order that a CPU is fastest in."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fgrpo_jax import sharding


def product(equation: str, x: Array, weight: Array, dtype: Any = None) -> Array:
    """jnp.einsum of two arrays, accumulated and returned in dtype.

    For the gradient of the weight, a sum over rows, XLA on a CPU first copies the result's
    cotangent transposed. Where that is larger than both others together, the CPU gets the same
    gradient with its own axes turned to compute, and so transposes x, and what comes out.
    """
    return jnp.asarray(_product(equation, x, weight, dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def _product(equation: str, x: Array, weight: Array, dtype: Any) -> Array:
    return jnp.einsum(equation, x, weight, preferred_element_type=dtype)


def _forward(equation: str, x: Array, weight: Array, dtype: Any) -> tuple[Array, Any]:
    return _product(equation, x, weight, dtype), (x, weight)


def _backward(equation: str, dtype: Any, kept: tuple[Array, Array], y_: Array) -> Any:
    x, weight = kept
    x_axes, weight_axes, y_axes = equation.replace("->", ",").split(",")

    def plain(x: Array, weight: Array, y_: Array) -> tuple[Array, Array]:
        forward = functools.partial(jnp.einsum, equation, preferred_element_type=dtype)
        return jax.vjp(forward, x, weight)[1](y_)

    def turned(x: Array, weight: Array, y_: Array) -> Array:
        shared = [axis for axis in weight_axes if axis in x_axes and axis in y_axes]
        read = [axis for axis in weight_axes if axis not in y_axes]
        made = [axis for axis in weight_axes if axis not in x_axes]
        axes = "".join(shared + read + made)
        weight_ = jnp.einsum(f"{x_axes},{y_axes}->{axes}", x.astype(y_.dtype), y_)
        weight_ = jax.lax.optimization_barrier(weight_)  # else XLA turns it back
        return jnp.einsum(f"{axes}->{weight_axes}", weight_).astype(weight.dtype)

    x_, weight_ = plain(x, weight, y_)
    # several devices of a CPU stand for an accelerator's, and reduce gradients as those do
    if y_.size > x.size + weight.size and sharding.shards(*sharding.AXES) == 1:
        weight_ = jax.lax.platform_dependent(
            x, weight, y_, cpu=turned, default=lambda *args: plain(*args)[1]
        )
    return x_, weight_


_product.defvjp(_forward, _backward)
