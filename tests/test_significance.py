"""The paired test against enumeration of all subsamples, and against a Monte Carlo of its own."""

import itertools

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from fgrpo_jax import significance
from fgrpo_jax.pass_at_k import pass_at_k
from fgrpo_jax.significance import paired_test


def all_subsamples(correct, samples, m, k):
    """pass@k of every choice of m of the samples, by looking at all k of each: brute force."""
    rights = [1] * correct + [0] * (samples - correct)
    return [
        np.mean([any(some) for some in itertools.combinations(chosen, k)])
        for chosen in itertools.combinations(rights, m)
    ]


@pytest.mark.parametrize("k", [1, 2, 3])
def test_subsamples_have_the_law_of_all_choices(k):
    counts, n, m = np.array([2, 5, 0]), 6, 3
    each = [all_subsamples(int(c), n, m, k) for c in counts]
    exact = np.array([np.mean(x) for x in itertools.product(*each)])
    drawn = significance.subsampled(counts, n, m, k, 40_000, np.random.default_rng(0))
    error = 4.5 * exact.std() / np.sqrt(40_000)
    assert drawn.mean() == pytest.approx(exact.mean(), abs=error)
    assert exact.mean() == pytest.approx(pass_at_k(counts, n, k).mean())  # unbiased
    for value in np.unique(exact.round(9)):
        share = np.mean(np.isclose(exact, value))
        found = np.mean(np.isclose(drawn, value))
        assert found == pytest.approx(share, abs=4.5 * np.sqrt(share * (1 - share) / 40_000) + 1e-9)


def test_p_and_interval_against_enumeration():
    """One problem, A 1 of 6 right and B 4 of 6, m = 3: all pairs of choices."""
    a, b = (np.array(all_subsamples(c, 6, 3, 1)) for c in (1, 4))
    difference = (b[None] - a[:, None]).reshape(-1)
    test = paired_test(np.array([1]), np.array([4]), samples=6, k=1, m=3, draws=40_000)
    assert test.difference == pytest.approx(0.5)
    sides = np.mean(difference <= 1e-12), np.mean(difference >= -1e-12)
    assert test.p == pytest.approx(2 * min(sides), abs=0.015)
    assert (test.low, test.high) == pytest.approx(tuple(np.quantile(difference, (0.025, 0.975))))


def test_equal_runs_do_not_differ_and_others_do():
    counts = np.random.default_rng(1).integers(0, 1025, 60)
    same = paired_test(counts, counts, samples=1024, k=1, draws=2000)
    assert same.difference == 0 and same.p > 0.2 and same.low < 0 < same.high
    better = np.minimum(counts + 60, 1024)
    found = paired_test(counts, better, samples=1024, k=1, draws=2000)
    assert found.low > 0 and found.p < 0.01
    turned = paired_test(better, counts, samples=1024, k=1, draws=2000)
    assert turned.high < 0 and turned.p < 0.01 and turned.difference == -found.difference


def test_it_is_calibrated():
    """Two runs of one policy: p below 0.05 comes at most as often as that; draws of a quarter
    have a wider spread than the whole, so rarer."""
    random = np.random.default_rng(2)
    rates = random.random(30)
    ps = [
        paired_test(
            *random.binomial(64, rates, (2, 30)), samples=64, k=1, m=16, draws=400, seed=i
        ).p
        for i in range(200)
    ]
    assert np.mean(np.array(ps) < 0.05) <= 0.05


def test_the_papers_size():
    """500 problems, 50,000 draws of 256 of 1,024: no overflow, and p never 0."""
    counts = np.tile([0, 1, 512, 1023, 1024], 100)
    test = paired_test(counts, counts, samples=1024, k=256, draws=50_000)
    assert 0 < test.p <= 1 and test.difference == 0 and -0.1 < test.low < 0 < test.high < 0.1


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(m=8), "k is 1, m 8 and n 8: 1 <= k <= m < n must hold"),
        (dict(k=5, m=4), "k is 5, m 4"),
        (dict(a_P=np.array([], int), b_P=np.array([], int)), "the two have 0 and 0 problems"),
    ],
)
def test_sizes_that_do_not_fit(change, message):
    settings = dict(a_P=np.array([3]), b_P=np.array([4]), samples=8, k=1, m=4) | change
    with pytest.raises(ValueError, match=message):
        paired_test(**settings)


def file(path, correct, samples=64, **more):
    columns = {"problem": range(len(correct)), "samples": [samples] * len(correct)}
    parquet.write_table(pyarrow.table(columns | {"correct": correct} | more), path)
    return str(path)


def test_the_command(tmp_path, capsys):
    a, b = file(tmp_path / "a.parquet", [1, 2, 3]), file(tmp_path / "b.parquet", [40, 50, 60])
    assert significance.main([a, b, "--draws", "500", "--k", "1,4,99"]) == 0
    out = capsys.readouterr().out
    assert "3 problems, n 64, m 16, 500 draws" in out and "3.1" in out and "78.1" in out
    assert "+75.0" in out and "│ 99 " not in out
    assert significance.main([a, file(tmp_path / "c.parquet", [1, 2])]) == 2
    assert "has 64 samples of 3 problems" in capsys.readouterr().err
    assert significance.main([a, str(tmp_path / "d.parquet")]) == 2
    assert "d.parquet does not exist" in capsys.readouterr().err
    (tmp_path / "e.parquet").write_text("no parquet")
    assert significance.main([a, str(tmp_path / "e.parquet")]) == 2
    assert "e.parquet is no file of fgrpo_jax.evaluate" in capsys.readouterr().err
    assert significance.main([a, b, "--k", "x"]) == 2
    assert "--k is 'x': give whole numbers" in capsys.readouterr().err
