"""The categorical simulation against autodiff, the draws' laws, and our reference values."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fgrpo_jax import config, main
from fgrpo_jax.experiments import categorical, figures

CONFIG = pathlib.Path(__file__).parents[1] / "configs/categorical.py"
SMALL = "actions=1200 right=100 samples=[8,64] steps=20 every=10 seeds=2 gammas=[0,0.5,1]".split()


def settings(*overrides):
    return config.read(str(CONFIG), overrides, default=categorical.default)


def run(folder, *overrides):
    flags = [f"--config.{override}" for override in overrides]
    load = functools.partial(config.read, default=categorical.default)
    argv = ["--config", str(CONFIG), "--workdir", str(folder), *flags]
    return main.run(functools.partial(categorical.study, command=""), "", argv, load)


@pytest.mark.parametrize("actions", [5, 300, 1024])
def test_draws_follow_the_probabilities(actions):
    p = np.random.default_rng(0).dirichlet(np.full(actions, 0.3))
    draw = jax.jit(jax.vmap(lambda key: categorical.draw_counts(key, jnp.float32(p), 4096)))
    counts = np.asarray(draw(jax.random.split(jax.random.key(0), 200)))
    assert (counts.sum(1) == 4096).all()
    total, expected = counts.sum(0), 4096 * 200 * p
    often = expected > 5
    z = (total - expected)[often] / np.sqrt(expected * (1 - p))[often]
    assert np.abs(z).max() < 4.5 and (z**2).sum() < often.sum() + 5 * np.sqrt(2 * often.sum())
    np.testing.assert_allclose(  # of one group: the variance of a multinomial
        counts.var(0)[np.argmax(p)], 4096 * p.max() * (1 - p.max()), rtol=0.35
    )


def test_rare_actions_are_drawn_as_often_as_they_should_be():
    """Of probability 1e-7, a hundred thousand of them: one draw in a hundred."""
    p = np.full(128_000, 1e-7)
    p[:1000] = (1 - 127_000e-7) / 1000
    draw = jax.jit(lambda key: categorical.draw_counts(key, jnp.float32(p), 1 << 20))
    rare = float(draw(jax.random.key(0))[1000:].sum())
    expected = (1 << 20) * 0.0127
    assert rare == pytest.approx(expected, abs=4.5 * np.sqrt(expected))


@pytest.mark.parametrize("surrogate", ["log", "linear"])
@pytest.mark.parametrize("gamma", [0.0, 1.0])
def test_the_gradient_is_that_of_the_surrogate(surrogate, gamma):
    """By autodiff, over the draws one by one."""
    z = jax.random.normal(jax.random.key(0), (6,))
    drawn = np.array([0, 3, 3, 5, 1, 0, 0, 2])
    reward = np.float32([1, 1, -1, -1, 1, -1])
    mean = reward[drawn].mean()
    centred = jnp.asarray(reward[drawn] - mean) * (1 - np.mean(reward[drawn] == 1)) ** gamma

    def objective(z):
        of = jax.nn.log_softmax if surrogate == "log" else jax.nn.softmax
        return (centred * of(z)[drawn]).mean()

    count = jnp.float32(np.bincount(drawn, minlength=6))
    found = categorical.gradient(z, count, jnp.asarray(reward), jnp.float32(gamma), surrogate)
    np.testing.assert_allclose(found, jax.grad(objective)(z), atol=1e-7)


def test_the_start_is_the_papers():
    """Right mass 0.6301, and the entropy of its three kinds of answers."""
    rows = categorical.run(settings("steps=1", "every=1", "seeds=1", "gammas=0"), 2)
    z = np.repeat([5.0, 3.0, 0.0], [1, 9_999, 118_000])
    p = np.exp(z) / np.exp(z).sum()
    assert rows[0]["right_mass"] == pytest.approx(p[:10_000].sum(), rel=1e-5)
    assert p[:10_000].sum() == pytest.approx(0.6301, abs=5e-5)
    assert rows[0]["entropy"] == pytest.approx(-(p * np.log(p)).sum(), rel=1e-5)
    assert rows[0]["retained"] == pytest.approx(1)


def test_metrics_by_hand():
    """One right answer gains what another and the wrong one lose: a loss of 0.1 in 0.8 counts."""
    first, now = np.float32([0.4, 0.3, 0.1, 0.2]), np.float32([0.6, 0.2, 0.1, 0.1])
    right = jnp.array([True, True, True, False])
    found = categorical.measure(jnp.log(now), jnp.asarray(first), right)
    entropy = -(0.6 * np.log(0.6) + 0.2 * np.log(0.2) + 2 * 0.1 * np.log(0.1))
    np.testing.assert_allclose(found, [0.9, 0.875, entropy], rtol=1e-5)


def test_middle_groups_lose_what_the_focal_weight_keeps_more_of():
    """PAPER's reference at N = 256, of one seed: right mass, retained, entropy."""
    end = categorical.finals(categorical.run(settings("every=1000"), 256))
    for gamma, right, retained in ((0.0, 0.993, 0.0425), (1.0, 0.975, 0.149)):
        assert end[gamma, 256]["right_mass"] == pytest.approx(right, abs=3e-3)
        assert end[gamma, 256]["retained"] == pytest.approx(retained, rel=0.1)
    assert end[0.0, 256]["entropy"] == pytest.approx(0.48, rel=0.15)


def test_plain_gradient_ascent_does_not_move():
    c = settings("optimizer=sgd", "steps=100", "every=100", "seeds=1")
    for row in categorical.run(c, 256):
        assert row["retained"] > 0.999 and row["right_mass"] == pytest.approx(0.6301, abs=2e-4)


def test_it_goes_on_where_it_was_and_refuses_another_config(tmp_path, monkeypatch, capsys):
    assert run(tmp_path, *SMALL) == 0
    rows = figures.read_csv(tmp_path / "categorical.csv")
    assert len(rows) == 2 * 3 * 2 * 3
    figures.write_csv(tmp_path / "categorical.csv", [r for r in rows if r["samples"] == 8])
    (tmp_path / "categorical.png").unlink()
    asked = []
    real = categorical.run
    monkeypatch.setattr(categorical, "run", lambda c, n: (asked.append(n), real(c, n))[1])
    assert run(tmp_path, *SMALL) == 0
    assert asked == [64] and figures.read_csv(tmp_path / "categorical.csv") == rows
    assert (tmp_path / "categorical.png").read_bytes()[:4] == b"\x89PNG"
    assert run(tmp_path, *SMALL, "seed=5") == 2
    assert "it differs in seed (there 0, here 5)" in capsys.readouterr().err
    assert run(tmp_path, *SMALL, "steps=40") == 2  # though a training run may have more
    assert "it differs in steps (there 20, here 40)" in capsys.readouterr().err


@pytest.mark.parametrize(
    "override, says",
    [
        ("surrogate=ratio", "surrogate is 'ratio': it must be one of log, linear"),
        ("optimizer=lion", "optimizer is 'lion': it must be one of adam, sgd"),
        ("right=128000", "right is 128000: it must be from 1 to below actions, 128000"),
        ("every=7", "steps is 1000: it must be a multiple of every, 7"),
        ("samples=[1]", "samples is (1,): give group sizes of 2 or more"),
        ("samples=[a]", "config key samples takes a whole number or a JSON list of whole numbers"),
        ("gammas=-1", "gammas is (-1.0,): give exponents of 0 or more"),
        ("seeds=0", "seeds is 0: it must be above 0"),
        ("step=3", "there is no config key 'step'; did you mean 'steps'?"),
    ],
)
def test_mistakes(tmp_path, capsys, override, says):
    assert run(tmp_path, override) == 2
    assert says in capsys.readouterr().err


REFERENCE = (  # of one seed, by an independent program: gamma, N, right mass, retained
    (0, 2, 0.6325, 0.994), (0, 8, 0.652, 0.965), (0, 32, 0.703, 0.962), (0, 256, 0.993, 0.0425),
    (0, 1024, 0.9965, 0.033), (0, 8192, 0.9989, 0.043), (0, 65536, 0.9967, 0.619),
    (0, 131072, 0.9935, 0.995), (1, 2, 0.6325, 0.994), (1, 256, 0.975, 0.149),
    (1, 8192, 0.992, 0.195), (1, 131072, 0.9714, 1.0),
)  # fmt: skip


def test_the_published_sweep_is_the_papers_figure_2():
    """The data beside the README's picture: each statement of the paper, and each reference value
    within four standard deviations of the difference between one seed and the mean of four."""
    rows = figures.read_csv(CONFIG.parents[1] / "docs/figures/categorical.csv")
    c = settings()
    assert {(row["gamma"], row["samples"], row["seed"]) for row in rows} == {
        (gamma, n, seed) for gamma in c.gammas for n in c.samples for seed in range(c.seeds)
    }
    held = categorical.statements(rows)
    assert len(held) == 7 and all(held.values()), held
    end = [row for row in rows if row["step"] == c.steps]
    for gamma, n, right, retained in REFERENCE:
        mine = [row for row in end if (row["gamma"], row["samples"]) == (gamma, n)]
        for name, reference in (("right_mass", right), ("retained", retained)):
            values = np.array([row[name] for row in mine])
            rounding = 0.0006
            error = 4 * values.std(ddof=1) * np.sqrt(1 + 1 / 4) + rounding
            assert abs(values.mean() - reference) < error, (gamma, n, name, values, reference)
