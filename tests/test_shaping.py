import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fgrpo_jax import advantages, shaping


def test_overlong_penalty_by_hand():
    """Limit 20480, buffer 4096: DAPO's own numbers."""
    lengths = jnp.array([1, 16384, 18432, 20480])
    out = shaping.overlong_penalty(lengths, 20480, 4096)
    np.testing.assert_allclose(out, [0, 0, -0.5, -1])
    np.testing.assert_allclose(shaping.overlong_penalty(lengths, 20480, 4096, 2.0), 2 * out)
    assert shaping.overlong_penalty(jnp.array(99999), 20480, 4096) == -1  # and no further
    assert shaping.overlong_penalty(lengths, 20480, 0).tolist() == [0, 0, 0, 0]


def test_unlikeliness_by_hand():
    """Of four, ranked by likelihood; only right ones change, by 0.25 * (4 - rank) / 4."""
    logp = jnp.array([[-4.0, -1.0, -3.0, -2.0]])  # ranks 4, 1, 3, 2
    correct = jnp.array([[1.0, 1.0, 0.0, 1.0]])
    out = shaping.unlikeliness_reward(2 * correct - 1, correct, logp)
    np.testing.assert_allclose(out, [[1, 1 - 0.25 * 3 / 4, -1, 1 - 0.25 * 2 / 4]])
    valid = jnp.array([[True, False, True, True]])  # ranks 3, -, 2, 1 of three
    out = shaping.unlikeliness_reward(correct, correct, logp, valid)
    np.testing.assert_allclose(out[0, [0, 2, 3]], [1, 0, 1 - 0.25 * 2 / 3], rtol=1e-6)


def test_differential_smoothing_by_hand():
    logp, correct = jnp.array([[-2.0, -2.0, -2.0]]), jnp.array([[1.0, 0.0, 0.0]])
    valid = jnp.array([[True, True, False]])
    out = shaping.differential_smoothing(correct, logp, valid, 0.05, 0.1)
    np.testing.assert_allclose(out, [[0.1, -0.2, 0]], rtol=1e-6)


def test_domain_weights_of_the_paper():
    out = shaping.domain_weight(jnp.array([0.75, 1 / 12]))
    np.testing.assert_allclose(out, [0.847, 2.565], atol=5e-4)
    np.testing.assert_allclose(
        shaping.domain_weight(jnp.array([0.75]), "log_squared"), out[:1] ** 2
    )
    np.testing.assert_allclose(shaping.domain_weight(jnp.array([0.25]), "inverse"), [4])


def test_disco_with_one_domain_is_maxrl():
    rewards = jnp.array([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0], [0.0] * 4])
    weighted = rewards * shaping.difficulty_weight(rewards)[:, None]
    np.testing.assert_allclose(
        advantages.mean_only_advantage(weighted), advantages.maxrl_advantage(rewards), rtol=1e-4
    )


@settings(deadline=None, max_examples=40)
@given(st.lists(st.floats(-2, 2, width=16), min_size=6, max_size=6), st.integers(2, 6))
def test_max_variance_subset_against_all_subsets(rewards, size):
    (chosen,) = np.asarray(shaping.max_variance_subset(jnp.array([rewards], jnp.float32), size))
    assert len(set(chosen.tolist())) == size
    rewards = np.array(rewards)
    best = max(rewards[list(s)].var() for s in itertools.combinations(range(6), size))
    np.testing.assert_allclose(rewards[chosen].var(), best, rtol=1e-5, atol=1e-6)


def test_binary_rewards_give_half_and_half():
    rewards = jnp.array([[1.0] * 3 + [0.0] * 13, [1.0] * 10 + [0.0] * 6, [1.0] * 16])
    chosen = np.asarray(shaping.max_variance_subset(rewards, 8))
    assert np.take_along_axis(np.asarray(rewards), chosen, 1).sum(1).tolist() == [3, 4, 8]


def test_invalid_samples_are_chosen_last():
    rewards = jnp.array([[9.0, 1.0, 0.0, -9.0, 0.5], [9.0, 1.0, 0.0, -9.0, 0.5]])
    valid = jnp.array([[False, True, True, False, True], [False, True, False, False, False]])
    chosen = np.asarray(shaping.max_variance_subset(rewards, 3, valid))
    assert set(chosen[0].tolist()) == {1, 2, 4} and 1 in chosen[1] and len(set(chosen[1])) == 3
    assert set(np.asarray(shaping.max_variance_subset(rewards, 2, valid))[0].tolist()) == {1, 2}


@pytest.mark.parametrize("size", [0, 6])
def test_impossible_sizes(size):
    with pytest.raises(ValueError, match=f"size is {size}: it must be in 1 ... 5"):
        shaping.max_variance_subset(jnp.zeros((1, 5)), size)
