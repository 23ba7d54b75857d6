import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import DATA

from fgrpo_jax import losses

CASES = json.loads((DATA / "loss_parity.json").read_text())


def one(ratio, advantage, loss=losses.ppo_clip, **bounds):
    """The loss of a single token."""
    logp, zero = jnp.full((1, 1), np.log(ratio), jnp.float32), jnp.zeros((1, 1))
    return float(loss(logp, zero, jnp.full((1, 1), advantage, jnp.float32), **bounds)[0, 0])


@pytest.mark.parametrize(
    "ratio, advantage, expected",
    [
        (1.0, 2.0, -2.0),
        (1.1, 2.0, -2.2),
        (1.5, 2.0, -2.56),  # paid up to 1 + 0.28
        (0.5, 2.0, -1.0),
        (0.5, -2.0, 1.6),  # no further than 1 - 0.2
        (1.5, -2.0, 3.0),
        (4.0, -2.0, 6.0),  # dual clip at 3
        (4.0, 2.0, -2.56),
    ],
)
def test_ppo_clip_by_hand(ratio, advantage, expected):
    assert one(ratio, advantage, clip_low=0.2, clip_high=0.28) == pytest.approx(expected, rel=1e-6)


def test_without_dual_clip():
    assert one(4.0, -2.0, dual_clip=0.0) == pytest.approx(8.0, rel=1e-6)


@pytest.mark.parametrize("ratio, weight", [(0.5, 0.5), (1.0, 1.0), (7.0, 6.0), (1e-8, 1e-8)])
def test_cispo_by_hand(ratio, weight):
    logp = np.log(ratio)
    assert one(ratio, 3.0, losses.cispo) == pytest.approx(-weight * 3 * logp, rel=1e-5, abs=1e-12)
    gradient = jax.grad(lambda x: losses.cispo(x, jnp.zeros((1, 1)), jnp.full((1, 1), 3.0)).sum())
    out = gradient(jnp.full((1, 1), logp, jnp.float32)).item()
    assert out == pytest.approx(-3 * weight, rel=1e-5)


def test_extreme_ratios_are_finite():
    for loss in (losses.ppo_clip, losses.cispo):
        for logp in (-1e4, 1e4):
            for advantage in (-1.0, 1.0):
                value, grad = jax.value_and_grad(
                    lambda x, loss=loss, a=advantage: loss(
                        x, jnp.zeros((1, 1)), jnp.full((1, 1), a)
                    ).sum()
                )(jnp.full((1, 1), logp))
                assert np.isfinite(value) and np.isfinite(grad)


def test_is_clipped():
    logp = jnp.log(jnp.array([[1.3, 1.3, 0.7, 0.7, 1.0]]))
    advantage = jnp.array([[1.0, -1.0, 1.0, -1.0, 1.0]])
    out = losses.is_clipped(logp, jnp.zeros((1, 5)), advantage, 0.2, 0.2)
    assert out.tolist() == [[True, False, False, True, False]]


def test_token_mean_ignores_masked_values_and_nothing_is_no_nan():
    loss = jnp.array([[1.0, 2.0, jnp.nan], [jnp.inf, 3.0, 7.0]])
    mask = jnp.array([[True, True, False], [False, True, False]])
    total, count = losses.token_mean(loss, mask)
    assert (float(total), float(count)) == (6, 3)
    total, count = losses.token_mean(loss, jnp.zeros((2, 3), bool))
    assert (float(total), float(count)) == (0, 0)
