import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fgrpo_jax import sharding
from fgrpo_jax.numerics import MASKED
from fgrpo_jax.sampling import Sampling, draw, sample_token, truncate


@pytest.mark.parametrize("vocab", [1, 2, 3, 48, 100, 257])
def test_sample_token_against_the_distribution_function(vocab):
    logits = 2 * jax.random.normal(jax.random.key(vocab), (1, vocab))
    p = np.asarray(jax.nn.softmax(logits[0]), np.float64)
    uniform = (np.arange(20_000) + 0.5) / 20_000
    drawn, log_mass = sample_token(
        jnp.broadcast_to(logits, (20_000, vocab)), jnp.asarray(uniform, jnp.float32)
    )
    exact = np.log(np.exp(np.asarray(logits, np.float64)).sum())
    np.testing.assert_allclose(log_mass, exact, rtol=1e-5)
    share = np.bincount(np.asarray(drawn), minlength=vocab) / 20_000
    np.testing.assert_allclose(share, p, atol=1.5e-4)


def test_sample_token_never_draws_what_has_no_probability():
    logits = jnp.full((3, 100), MASKED).at[:, 41].set(0.0)
    almost_one = np.nextafter(np.float32(1), np.float32(0))
    assert sample_token(logits, jnp.array([0.0, 0.5, almost_one]))[0].tolist() == [41] * 3


@pytest.mark.parametrize("vocab", [48, 50, 1030])  # tp divides it, or does not
def test_sharded_vocabularies_draw_the_same(vocab):
    logits = 2 * jax.random.normal(jax.random.key(vocab), (64, vocab))
    uniform = jax.random.uniform(jax.random.key(1), (64,))
    plain = sample_token(logits, uniform)
    exact = jax.nn.logsumexp(logits, axis=-1)
    with jax.set_mesh(sharding.make_mesh(1, 2, 4)):
        sharded = jax.jit(sample_token)(logits, uniform)
    np.testing.assert_array_equal(plain[0], sharded[0])
    for _, log_mass in (plain, sharded):
        np.testing.assert_allclose(log_mass, exact, rtol=1e-6)


def kept(logits, **s):
    out = np.asarray(truncate(jnp.asarray([logits], jnp.float32), Sampling(**s)))[0]
    return np.flatnonzero(out > MASKED / 2).tolist()


P = np.log([0.1, 0.4, 0.05, 0.3, 0.15])


@pytest.mark.parametrize(
    "s, expected",
    [
        (dict(), [0, 1, 2, 3, 4]),
        (dict(top_k=2), [1, 3]),
        (dict(top_k=9), [0, 1, 2, 3, 4]),
        (dict(top_p=0.4 - 1e-3), [1]),
        (dict(top_p=0.4 + 1e-3), [1, 3]),  # the token that crosses stays
        (dict(top_p=0.7 + 1e-3), [1, 3, 4]),
        (dict(top_p=1e-9), [1]),
        (dict(min_p=0.5), [1, 3]),  # at least half of 0.4
        (dict(min_p=0.2), [0, 1, 3, 4]),
        (dict(min_p=1.0), [1]),
        (dict(top_k=3, top_p=0.8), [1, 3]),  # of 0.4, 0.3, 0.15 renormalised: 0.47 + 0.35 > 0.8
        (dict(top_k=3, top_p=0.83), [1, 3, 4]),
        (dict(top_p=0.9, min_p=0.5), [1, 3]),
    ],
    ids=str,
)
def test_truncation_by_hand(s, expected):
    assert kept(P, **s) == expected


def test_truncation_of_ties_and_of_masked_rows():
    assert kept(np.zeros(4), top_k=2) == [0, 1, 2, 3]
    assert kept(np.array([0.0, MASKED, 0.0]), top_k=3, top_p=0.999) == [0, 2]


def test_draw_gives_the_logprob_of_the_policy_and_of_what_was_sampled_from():
    logits = jnp.asarray(P, jnp.float32)[None].repeat(4000, axis=0)
    uniform = jax.random.uniform(jax.random.key(0), (4000,))
    token, logp, sampled = draw(logits, uniform, Sampling(top_k=3))
    share = np.bincount(np.asarray(token), minlength=5) / 4000
    np.testing.assert_allclose(share, np.array([0, 0.4, 0, 0.3, 0.15]) / 0.85, atol=0.03)
    np.testing.assert_allclose(logp, P[token], rtol=1e-5)
    np.testing.assert_allclose(sampled, P[token] - np.log(0.85), rtol=1e-5, atol=1e-6)
    assert draw(logits, uniform, Sampling())[2] is None
    greedy, logp, sampled = draw(logits, uniform, Sampling(0.0))
    assert set(greedy.tolist()) == {1} and not np.asarray(sampled).any()
    np.testing.assert_allclose(logp, np.log(0.4), rtol=1e-5)


@pytest.mark.parametrize("s", [Sampling(top_k=7), Sampling(top_p=0.8), Sampling(0.5, 9, 0.7, 0.1)])
def test_truncation_against_sorting(s):
    logits = np.asarray(3 * jax.random.normal(jax.random.key(3), (50, 300)))
    ours = np.asarray(truncate(jnp.asarray(logits), s)) > MASKED / 2
    for row, kept_V in zip(logits.astype(np.float64), ours, strict=True):
        order = np.argsort(-row)[: s.top_k or None]
        p = np.exp(row[order] - row.max())
        p /= p.sum()
        order = order[np.cumsum(p) - p < s.top_p]
        order = order[np.exp(row[order] - row.max()) >= s.min_p]
        assert np.flatnonzero(kept_V).tolist() == sorted(order.tolist())


def test_nothing_is_sorted_or_gathered():
    """A vocabulary shared by devices stays so."""
    logits, uniform = jnp.zeros((4, 64)), jnp.zeros(4)
    mesh = sharding.make_mesh(1, 2, 4)
    logits = jax.device_put(logits, sharding.activation(mesh, "BV"))
    with jax.set_mesh(mesh):
        text = (
            jax.jit(draw, static_argnums=2)
            .lower(logits, uniform, Sampling(0.8, 5, 0.9, 0.1))
            .compile()
            .as_text()
        )
    assert " sort(" not in text and "f32[2,64]{1,0} all-gather" not in text
