import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fgrpo_jax import config
from fgrpo_jax.optimizer import make_optimizer, make_schedule


def rates(updates, updates_a_step=1, **changes):
    c = config.default()
    c.optim.update({"lr": 0.8, **changes})
    return [float(make_schedule(c.optim, updates_a_step)(i)) for i in updates]


def test_warm_up():
    assert rates(range(6), warmup=4) == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8])
    assert rates([0, 5], warmup=0) == rates([0, 5], warmup=1) == pytest.approx([0.8, 0.8])


def test_decay():
    out = rates([0, 1, 9, 10, 12, 14, 99], warmup=2, decay_start=10, decay_end=14)
    assert out == pytest.approx([0.4, 0.8, 0.8, 0.8, 0.4, 0, 0])


def test_the_decay_is_counted_in_steps():
    out = rates([0, 39, 40, 48, 56], updates_a_step=4, warmup=0, decay_start=10, decay_end=14)
    assert out == pytest.approx([0.8, 0.8, 0.8, 0.4, 0])


def test_a_first_moment_in_bfloat16():
    """Half its memory; of a constant gradient it is what float32 has, to 8 bits."""
    c = config.default()
    c.optim.update({"lr": 0.1, "warmup": 0, "weight_decay": 0.0, "first_moment": "bfloat16"})
    optimizer = make_optimizer(c.optim, make_schedule(c.optim, 1))
    params = jnp.zeros(2)
    state = optimizer.init(params)
    moments = {x.dtype.name for x in jax.tree.leaves(state) if x.ndim}
    assert moments == {"bfloat16", "float32"}
    with jax.numpy_dtype_promotion("standard"):
        for _ in range(3):  # each step of a constant gradient is -lr
            updates, state = optimizer.update(jnp.array([0.3, -0.4]), state, params)
            params = params + updates
    np.testing.assert_allclose(params, [-0.3, 0.3], rtol=3 * 2**-9)  # three roundings to 8 bits
    assert params.dtype == jnp.float32


def test_adamw_by_hand():
    c = config.default()
    c.optim.update({"lr": 0.1, "warmup": 0, "weight_decay": 0.5, "clip_norm": 1.0})
    optimizer = make_optimizer(c.optim, make_schedule(c.optim, 1))
    params = jnp.array([1.0, 2.0])
    # norm 5 is clipped to 1; the first step of Adam is the sign, whatever the size
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = optimizer.update(jnp.array([3.0, -4.0]), optimizer.init(params), params)
    np.testing.assert_allclose(updates, [-0.1 * (1 + 0.5), -0.1 * (-1 + 1.0)], atol=1e-6)
