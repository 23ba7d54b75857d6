import contextlib

import jax
import jax.numpy as jnp
import pytest

from fgrpo_jax import UserError, sharding
from fgrpo_jax.recompiles import Recompiles


@jax.jit
def total(state, batch):
    return {"w": state["w"] + batch["x"].sum(dtype=jnp.float32)}


STATE = {"w": jnp.float32(1)}


def ones(size, dtype=jnp.float32):
    return {"x": jax.block_until_ready(jnp.ones(size, dtype))}


@pytest.fixture
def made():
    with contextlib.ExitStack() as stack:
        yield lambda **kwargs: stack.enter_context(Recompiles(**kwargs))


def test_the_same_again_is_silent(made):
    batch, recompiles = ones(3), made(ends=True)
    total(STATE, batch)
    with recompiles.watch(True):
        total(STATE, batch)
    recompiles.check(3)


@pytest.mark.parametrize(
    "other, words",
    [((5, jnp.float32), "now f32[5] and before f32["), ((4, jnp.bfloat16), "now bf16[4]")],
)
def test_the_argument_that_changed_is_named(made, other, words):
    first, second = ones(4), ones(*other)
    total(STATE, first)
    recompiles = made(ends=True)
    with recompiles.watch(True):
        total(STATE, second)
    with pytest.raises(UserError) as error:
        recompiles.check(7)
    text = str(error.value)
    assert text.startswith("step 7 compiled jit(total) again")
    assert "batch['x']" in text and words in text
    recompiles.check(8)  # told once


def test_another_layout_for_which_jax_has_no_words(made):
    mesh = sharding.make_mesh(1, 8, 1)
    first = jax.device_put(ones(16), sharding.replicated(mesh))
    second = jax.device_put(first, sharding.activation(mesh, "B"))
    total(STATE, first)
    recompiles = made(ends=True)
    with recompiles.watch(True):
        total(STATE, second)
    with pytest.raises(UserError, match="compiled jit.total. again.*does not say why"):
        recompiles.check(3)


def test_outside_it_does_not_look_and_warnings_go_on(made):
    told = []
    recompiles = made(ends=False, tell=told.append)
    with recompiles.watch(False):
        total(STATE, ones(6))
    total(STATE, ones(7))
    recompiles.check(1)
    assert not told
    batch = ones(8)
    with recompiles.watch(True):
        total(STATE, batch)
    recompiles.check(2)
    assert len(told) == 1 and told[0].startswith("warning: step 2 compiled jit(total)")
