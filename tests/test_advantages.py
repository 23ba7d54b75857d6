import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fgrpo_jax.advantages import focal_weight, group_advantage, success_rate


def test_by_hand():
    # mean 1/4, Bessel's variance (3 * 1/16 + 9/16) / 3 = 1/4, std 1/2
    out = group_advantage(jnp.array([[1.0, 0.0, 0.0, 0.0]]))
    np.testing.assert_allclose(out, [[1.5, -0.5, -0.5, -0.5]], rtol=3e-6)


def test_against_numpy_for_every_group_of_eight():
    groups = np.array(list(itertools.product([0.0, 1.0], repeat=8)), np.float32)
    mean, std = groups.mean(1, keepdims=True), groups.std(1, ddof=1, keepdims=True)
    np.testing.assert_allclose(
        group_advantage(jnp.asarray(groups)), (groups - mean) / (std + 1e-6), atol=1e-5
    )


@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, 0.7, 0.1, 1 / 3, 1e-8, 12345.678])
@pytest.mark.parametrize("samples", [1, 2, 3, 8, 16])
def test_a_constant_group_is_exactly_zero(value, samples):
    assert not np.any(group_advantage(jnp.full((3, samples), value)))


def test_nearly_constant_is_not_constant():
    out = group_advantage(jnp.array([[1.0, 1.00001]]))
    # (+-d / 2) / (d / sqrt 2 + eps), d = 1e-5 rounded to float32
    d = float(np.float32(1.00001) - np.float32(1))
    expected = d / 2 / (d / np.sqrt(2) + 1e-6)
    np.testing.assert_allclose(out, [[-expected, expected]], rtol=0.01)


@pytest.mark.parametrize("rewards", [jnp.eye(4) + 0.5, jnp.ones((2, 4)), jnp.zeros((1, 1))])
def test_no_gradient_is_nan(rewards):
    assert np.isfinite(jax.grad(lambda r: (group_advantage(r) ** 2).sum())(rewards)).all()


PAPER = {  # PAPER.md's unit values for N = 8, k right
    0.5: [1, 0.9354, 0.8660, 0.7906, 0.7071, 0.6124, 0.5, 0.3536, 0],
    1.0: [1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0],
    2.0: [1, 0.7656, 0.5625, 0.3906, 0.25, 0.1406, 0.0625, 0.0156, 0],
    0.0: [1] * 9,
}


@pytest.mark.parametrize("gamma", PAPER)
def test_focal_weights_of_the_paper(gamma):
    correct = jnp.array([[1.0] * k + [0.0] * (8 - k) for k in range(9)])
    np.testing.assert_allclose(focal_weight(correct, gamma), PAPER[gamma], atol=5e-5)
    np.testing.assert_allclose(success_rate(correct), np.arange(9) / 8)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 2.0])
def test_focal_weight_is_exact_at_the_ends_for_every_group_size(gamma):
    """Compiled as 1 - sum / N, an all-right group of 6 comes out below 0, and its root as NaN."""
    for samples in (*range(1, 65), 80, 96, 100, 160, 1000):
        ends = jnp.stack([jnp.zeros(samples), jnp.ones(samples)])
        assert focal_weight(ends, gamma).tolist() == [1, 0 if gamma else 1], samples


def test_focal_weight_is_exact_at_the_ends():
    ends = jnp.array([[0.0] * 8, [1.0] * 8])
    for gamma in (0.3, 1.0, 50.0):
        assert focal_weight(ends, gamma).tolist() == [1, 0]
    assert focal_weight(ends, 0.0).tolist() == [1, 1]
    with pytest.raises(ValueError, match="at least 0"):
        focal_weight(ends, -1.0)


def test_focal_advantage_in_closed_form():
    # PAPER.md: with gamma 1/2 and the population std, A- = -sqrt(mu), A+ = (1 - mu) / sqrt(mu)
    for right in range(1, 8):
        group = jnp.array([[1.0] * right + [0.0] * (8 - right)])
        out = group_advantage(group) * focal_weight(group, 0.5)[:, None] * np.sqrt(8 / 7)
        mu = right / 8
        np.testing.assert_allclose(out[0, 0], (1 - mu) / np.sqrt(mu), rtol=1e-5)
        np.testing.assert_allclose(out[0, -1], -np.sqrt(mu), rtol=1e-5)


def test_permuting_a_group_permutes():
    rewards = jax.random.uniform(jax.random.key(0), (5, 8))
    order = np.random.default_rng(0).permutation(8)
    np.testing.assert_allclose(
        group_advantage(rewards[:, order]), group_advantage(rewards)[:, order], rtol=1e-5
    )
