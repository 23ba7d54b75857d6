import itertools
import math

import numpy as np
import pytest

from fgrpo_jax.pass_at_k import pass_at_k, powers_up_to


def test_against_every_draw():
    for n, c, k in itertools.product([5], range(6), range(1, 6)):
        right = [True] * c + [False] * (n - c)
        draws = [any(draw) for draw in itertools.combinations(right, k)]
        assert pass_at_k(np.array([c]), n, k)[0] == pytest.approx(np.mean(draws), abs=1e-12)


@pytest.mark.parametrize("n, k", [(256, 1), (256, 128), (1024, 256), (1024, 1024)])
def test_against_exact_integers(n, k):
    counts = np.array([0, 1, 2, 7, n // 2, n - k, n - 1, n])
    exact = [1 - math.comb(n - int(c), k) / math.comb(n, k) for c in counts]
    np.testing.assert_allclose(pass_at_k(counts, n, k), exact, atol=1e-12)


def test_ends():
    assert pass_at_k(np.array([0, 4]), 4, 4).tolist() == [0, 1]
    assert pass_at_k(np.array([1]), 4, 4).tolist() == [1]
    assert pass_at_k(np.array([3]), 8, 1)[0] == pytest.approx(3 / 8)


@pytest.mark.parametrize("counts, n, k", [([0], 4, 5), ([0], 4, 0), ([5], 4, 1), ([-1], 4, 1)])
def test_refuses_what_cannot_be_estimated(counts, n, k):
    with pytest.raises(ValueError):
        pass_at_k(np.array(counts), n, k)


def test_powers():
    assert powers_up_to(16) == [1, 2, 4, 8, 16]
    assert powers_up_to(12) == [1, 2, 4, 8, 12]
    assert powers_up_to(1) == [1]
