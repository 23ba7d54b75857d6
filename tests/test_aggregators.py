import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fgrpo_jax import aggregators

LOSS = jnp.array([[1.0, 2.0, jnp.nan], [3.0, 5.0, 7.0], [jnp.inf, 0.0, 0.0]])
MASK = jnp.array([[True, True, False], [True, True, True], [False, False, False]])


def mean(aggregate, **settings):
    total, count = aggregate(LOSS, MASK, **settings)
    return float(total / count)


def test_by_hand():
    """Sums 3 of 2 tokens and 15 of 3, and an empty row; masked values are no numbers."""
    assert mean(aggregators.token_mean) == pytest.approx(18 / 5)
    assert mean(aggregators.sequence_mean_token_mean) == pytest.approx((1.5 + 5) / 2)
    assert mean(aggregators.sequence_mean_token_mean, count_empty=True) == pytest.approx(6.5 / 3)
    assert mean(aggregators.sequence_mean_token_sum) == pytest.approx(18 / 2)
    assert mean(aggregators.sequence_mean_token_sum, count_empty=True) == pytest.approx(18 / 3)
    assert mean(aggregators.constant_length, length=10) == pytest.approx(18 / 20)
    assert mean(aggregators.constant_length, length=10, count_empty=True) == pytest.approx(18 / 30)


@pytest.mark.parametrize("name", "token_mean sequence_mean_token_mean".split())
def test_nothing_is_no_nan(name):
    total, count = getattr(aggregators, name)(LOSS, jnp.zeros((3, 3), bool))
    assert (float(total), float(count)) == (0, 0)


def test_length_weight_by_hand():
    """Lengths 10 and 30: mean 20, Bessel's std sqrt 200, z = -+0.7071, h = 1 -+ 0.07857."""
    h = 1 + np.array([-1, 1]) / np.sqrt(2) / 9
    for exponent in (-2.0, 0.0, 1.0, 3.0):
        g = np.exp(h**exponent)
        out = aggregators.length_weight(jnp.array([[10.0, 30.0]]), jnp.float32(exponent))
        np.testing.assert_allclose(out[0], 2 * g / g.sum(), rtol=1e-5)


def test_length_weight_is_learnable():
    """At lambda 0, d f_1 / d lambda = N p_1 (ln h_1 - mean ln h), with p = 1 / N and h ** 0 = 1."""
    h = 1 + np.array([-1, 1]) / np.sqrt(2) / 9
    slope = jax.grad(lambda x: aggregators.length_weight(jnp.array([[10.0, 30.0]]), x)[0, 1])(
        jnp.float32(0)
    )
    np.testing.assert_allclose(slope, np.log(h[1]) - np.log(h).mean(), rtol=1e-4)


def test_invalid_rows_leave_the_weights():
    lengths, exponent = jnp.array([[100, 10, 30, 100]]), jnp.float32(2)
    valid = jnp.array([[False, True, True, False]])
    out = aggregators.length_weight(lengths, exponent, valid)
    pair = aggregators.length_weight(jnp.array([[10, 30]]), exponent)
    np.testing.assert_allclose(out, [[0, *pair[0], 0]], rtol=1e-6)
    assert not aggregators.length_weight(lengths, exponent, jnp.zeros((1, 4), bool)).any()


def test_equal_lengths_weigh_alike():
    out = aggregators.length_weight(jnp.full((2, 8), 7), jnp.float32(5))
    np.testing.assert_allclose(out, np.ones((2, 8)), rtol=1e-6)
    short = aggregators.length_weight(jnp.array([[0] + [100] * 400]), jnp.float32(-3))
    assert np.isfinite(short).all()  # z = -20: h would be below 0
