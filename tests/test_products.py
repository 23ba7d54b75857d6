import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fgrpo_jax.adapters import EQUATIONS, equations
from fgrpo_jax.logprobs import _pick
from fgrpo_jax.products import product

SIZES = dict(B=2, T=5, D=12, Q=4, K=2, H=3, F=20, V=31, R=2, U=7, S=6)
OTHERS = ["BTD,VD->BTV", "BKUH,BKSH->BKUS", "BKUS,BKSH->BKUH"]
OTHERS += [part for name in ("q_proj", "o_proj", "down_proj") for part in equations(name)[:2]]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("equation", [*EQUATIONS.values(), *OTHERS])
def test_value_and_gradients_are_einsum_s(equation, dtype):
    first, second = equation.split("->")[0].split(",")
    keys = jax.random.split(jax.random.key(0), 2)
    x, weight = (
        jax.random.normal(key, [SIZES[axis] for axis in axes], dtype)
        for key, axes in zip(keys, (first, second), strict=True)
    )
    plain = lambda x, w: jnp.einsum(equation, x, w, preferred_element_type=jnp.float32)
    ours = lambda x, w: product(equation, x, w, jnp.float32)
    loss = lambda f: lambda x, w: (f(x, w) ** 2).sum()
    np.testing.assert_array_equal(ours(x, weight), plain(x, weight))
    tolerance = 1e-5 if dtype == jnp.float32 else 2**-7
    for a, b in zip(
        *(jax.jit(jax.grad(loss(f), argnums=(0, 1)))(x, weight) for f in (ours, plain)), strict=True
    ):
        assert a.dtype == b.dtype == dtype
        a, b = (np.asarray(y, np.float32) for y in (a, b))
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * np.abs(b).max())


def test_what_is_picked_and_its_gradient():
    x = jnp.arange(24.0).reshape(2, 3, 4)
    index = jnp.array([[0, 3, 1], [2, 2, 0]])
    np.testing.assert_array_equal(_pick(4, x, index), [[0, 7, 9], [14, 18, 20]])
    gradient = jax.grad(lambda x: (_pick(4, x, index) * jnp.array([[1.0, 2, 3], [4, 5, 6]])).sum())(
        x
    )
    expected = np.zeros((2, 3, 4))
    for (b, t), value in zip(np.ndindex(2, 3), [1, 2, 3, 4, 5, 6], strict=True):
        expected[b, t, index[b, t]] = value
    np.testing.assert_array_equal(gradient, expected)
