"""The closed forms against draws, finite differences, exact fractions and the paper's numbers."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import beta

from fgrpo_jax import theory

GRID = [
    (mu, mu * rho, n)
    for mu in (1e-4, 0.2, 0.5, 0.8, 0.9999)
    for rho in (1e-4, 0.05, 0.2, 0.9)
    for n in (1, 2, 3, 8, 64, 1024, 131_072)
]


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def exact(mu, tau, n):
    """Lemma 3.1 in fractions of the very floats that are given."""
    mu, tau = Fraction(mu), Fraction(tau)
    if n > 1024:  # as fractions too long: as logarithms of 60 digits would do as well
        from decimal import Decimal, localcontext

        with localcontext() as context:
            context.prec = 60
            a, b, c = (Decimal(x.numerator) / x.denominator for x in (1 - tau, mu - tau, 1 - mu))
            return float(a**n - b**n - c**n)
    return float((1 - tau) ** n - (mu - tau) ** n - (1 - mu) ** n)


def test_the_tail_miss_probability_is_exact_to_float64(x64):
    mu, tau, n = (np.array(column) for column in zip(*GRID, strict=True))
    found = theory.tail_miss_probability(mu, tau, n)
    expected = [exact(*row) for row in GRID]
    np.testing.assert_allclose(found, expected, rtol=2e-11, atol=1e-300)


def test_and_to_float32_in_float32():
    mu, tau, n = (np.array(column, np.float32) for column in zip(*GRID, strict=True))
    found = theory.tail_miss_probability(mu, tau, n)
    rows = zip(mu.tolist(), tau.tolist(), n.astype(int).tolist(), strict=True)
    expected = np.array([exact(*row) for row in rows])
    seen = expected > 1e-30
    np.testing.assert_allclose(np.asarray(found)[seen], expected[seen], rtol=2e-2)
    np.testing.assert_allclose(found, expected, atol=3e-4)


def test_against_draws():
    draw = np.random.default_rng(0)
    for mu, tau, n in ((0.3, 0.015, 8), (0.8, 0.16, 16), (0.5, 0.1, 2), (0.2, 0.002, 64)):
        right = draw.random((100_000, n))
        correct, rare = right < mu, right < tau
        active = correct.any(1) & ~correct.all(1)
        share = (active & ~rare.any(1)).mean()
        error = 4 * np.sqrt(share * (1 - share) / 1e5)
        assert theory.tail_miss_probability(mu, tau, n) == pytest.approx(share, abs=error)
        assert theory.active_probability(mu, n) == pytest.approx(active.mean(), abs=6e-3)


def test_the_papers_leaf(x64):
    """Section 5.1: above 2^15 samples it falls, to below one in a thousand at 2^17."""
    n = 2 ** np.arange(1, 18)
    found = np.asarray(jax.vmap(lambda n: theory.tail_miss_probability(0.64, 6.3e-5, n))(n))
    assert found[-1] < 1e-3 and found[9] > 0.9 and found[14] == pytest.approx(0.127, abs=5e-4)
    assert np.argmax(found) < 14 and (np.diff(found[13:]) < 0).all()


PEAKS = {  # N* and the value there, at rho = .01 .05 .1 .2; by an argmax over exact fractions
    0.2: [(21, 0.950), (15, 0.825), (12, 0.716), (9, 0.558)],
    0.3: [(14, 0.952), (9, 0.832), (8, 0.726), (6, 0.572)],
    0.5: [(8, 0.953), (6, 0.832), (5, 0.724), (4, 0.568)],
    0.8: [(15, 0.856), (8, 0.610), (6, 0.467), (4, 0.329)],
}


@pytest.mark.parametrize("mu", PEAKS)
def test_the_table_of_peaks(mu, x64):
    tau = mu * np.array([0.01, 0.05, 0.1, 0.2])
    found = theory.peak_group_size(mu, tau)
    assert found.tolist() == [n for n, _ in PEAKS[mu]]
    value = theory.tail_miss_probability(mu, tau, found)
    np.testing.assert_allclose(value, [v for _, v in PEAKS[mu]], atol=5.1e-4)
    near = np.abs(np.asarray(theory.peak_group_size_estimate(mu, tau)) - np.asarray(found))
    assert (near < 1.01).all(), near


def test_the_peak_is_the_argmax(x64):
    draw = np.random.default_rng(1)
    n = np.arange(1, 4000)
    for _ in range(200):
        mu = draw.uniform(0.02, 0.98)
        tau = mu * draw.uniform(0.01, 0.9)
        values = theory.tail_miss_probability(mu, tau, n)
        assert int(theory.peak_group_size(mu, tau)) == n[np.argmax(values)]


@pytest.fixture
def problem(x64):
    """Fifty actions, of which some are right and eight draws were made; it can teach."""

    def make(seed):
        draw = np.random.default_rng(seed)
        p = np.exp(draw.normal(size=50))
        p /= p.sum()
        right = draw.random(50) < 0.4
        sampled = np.zeros(50, bool)
        sampled[draw.choice(50, 8, p=p)] = True
        return p, right, sampled

    return make


def moved(p, dz):
    z = np.log(p) + dz
    p = np.exp(z - z.max())
    return p / p.sum()


@pytest.mark.parametrize("rewards", [(1.0, -1.0), (1.0, 0.0)])
def test_mass_changes_are_those_of_a_small_step(problem, rewards):
    for seed in range(20):
        p, right, sampled = problem(seed)
        reward = np.where(sampled, np.where(right, *rewards), 0.0)
        by_hand = p * (reward - (reward * p).sum())
        arrays = tuple(map(jnp.asarray, (p, right, sampled)))
        change = theory.logit_change(*arrays, 0.25, *rewards)
        np.testing.assert_allclose(change, by_hand / 4)
        h = 1e-5
        gain = (moved(p, h * by_hand) - moved(p, -h * by_hand)) / (2 * h)
        unseen = right & ~sampled
        for wanted, group in (
            (theory.correct_mass_change(*arrays, 1.0, *rewards), right),
            (theory.unsampled_correct_mass_change(*arrays, 1.0, *rewards), unseen),
            (theory.mass_change(arrays[0], 4 * change, arrays[2]), sampled),
        ):
            assert float(wanted) == pytest.approx(gain[group].sum(), rel=1e-6, abs=1e-12)


def test_right_ones_gain_while_the_unsampled_of_them_lose(problem):
    """Nearly always where the sampled ones' reward, each counted by its probability, is above 0."""
    signs = []
    for seed in range(400):
        p, right, sampled = problem(seed)
        if p[sampled & right].sum() > p[sampled & ~right].sum() > 0:
            arrays = tuple(map(jnp.asarray, (p, right, sampled)))
            unseen = theory.unsampled_correct_mass_change(*arrays, 1.0)
            signs.append(theory.correct_mass_change(*arrays, 1.0) > 0 > unseen)
    assert len(signs) > 100 and np.mean(signs) > 0.9


def test_sampled_mass_against_draws_and_by_hand(x64):
    """p = 0.1 0.3 right, 0.2 0.4 wrong: of two right ones, the first is among them with 7/16."""
    p, right = np.array([0.1, 0.3, 0.2, 0.4]), np.array([True, True, False, False])
    arrays = jnp.asarray(p), jnp.asarray(right)
    pos, neg = theory.sampled_mass(*arrays, 2, 2)
    assert float(pos) == pytest.approx(0.1 * 7 / 16 + 0.3 * 15 / 16) and float(neg) == 0
    draw = np.random.default_rng(0)
    drawn = draw.choice(4, (200_000, 6), p=p)
    hit = (drawn[:, :, None] == np.arange(4)).any(1)
    k = right[drawn].sum(1)
    for count in range(7):
        rows = hit[k == count]
        pos, neg = theory.sampled_mass(*arrays, count, 6)
        assert float(pos) == pytest.approx((rows @ (p * right)).mean(), abs=4e-3)
        assert float(neg) == pytest.approx((rows @ (p * ~right)).mean(), abs=8e-3)


def test_more_right_ones_mean_more_right_and_less_wrong_mass(problem):
    p, right, _ = map(jnp.asarray, problem(3))
    pos, neg = jax.vmap(lambda k: theory.sampled_mass(p, right, k, 8))(jnp.arange(9))
    assert (np.diff(pos) > 0).all() and (np.diff(neg) < 0).all()
    assert (np.diff(pos - neg) > 0).all()  # Corollary H.2 for rewards of 1 and -1


def test_the_control_of_a_low_learning_rate(x64):
    for gamma in (0, 0.5, 1, 2, 3.7):
        expected = beta(1.5, gamma + 1.5) / beta(1.5, 1.5)
        assert float(theory.low_learning_rate_multiplier(gamma)) == pytest.approx(expected)
    assert float(theory.low_learning_rate_multiplier(2)) == pytest.approx(0.3125)
