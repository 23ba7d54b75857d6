"""Runs of several gammas and seeds: which are made, what is read of them, intervals by hand."""

import json
import pathlib
import types

import numpy as np
import pytest

from fgrpo_jax.experiments import compare, figures

CONFIG = str(pathlib.Path(__file__).parents[1] / "configs/tiny_arithmetic_focal.py")


def test_pass_at_k_of_every_seed_and_problem_by_hand():
    table = compare.pass_table(np.array([[0, 1], [2, 4]]), 4)
    np.testing.assert_allclose(table[0], [[0, 0.25], [0.5, 1]])  # k = 1
    np.testing.assert_allclose(table[1], [[0, 0.5], [5 / 6, 1]])  # k = 2: 1 - 1 / 6
    np.testing.assert_allclose(table[2], [[0, 1], [1, 1]])  # k = 4


def test_the_interval_is_that_of_the_mean():
    """Of one seed, 400 problems; then of seeds that differ and problems that do not."""
    draw = np.random.default_rng(0)
    values = draw.normal(0.5, 0.2, (1, 1, 400))
    mean, low, high = compare.interval(values)[:, 0]
    half = 1.96 * values.std() / 20
    assert mean == pytest.approx(values.mean())
    assert mean - low == pytest.approx(half, rel=0.1) and high - mean == pytest.approx(
        half, rel=0.1
    )
    seeds = np.repeat(np.array([0.2, 0.4, 0.6])[None, :, None], 50, axis=2)
    mean, low, high = compare.interval(seeds)[:, 0]
    assert mean == pytest.approx(0.4)
    assert low == pytest.approx(0.2) and high == pytest.approx(0.6)  # one of 27 draws each: 3.7 %


def test_bins_of_difficulty():
    bins = compare.difficulty(np.array([0.0, 0.05, 0.1, 0.95, 1.0]))
    assert [(name, inside.tolist()) for name, inside in bins] == [
        ("0 to 10 %", [True, True, False, False, False]),
        ("10 to 50 %", [False, False, True, False, False]),
        ("90 to 100 %", [False, False, False, True, True]),
    ]


def pretend(made, right_of):
    """In place of subprocess.run: what a run of four problems, 8 samples each, would leave."""

    def run(line):
        flags = dict(word.split("=") for word in line if "=" in word)
        gamma = float(flags["--config.algo.focal_gamma"])
        made.append((gamma, int(flags["--config.seed"])))
        path = pathlib.Path(line[line.index("--workdir") + 1])
        (path / "evaluation").mkdir(parents=True)
        steps = [
            {"step": i, "entropy": 1 / i, "reward": 0.1 * i, "groups_all_wrong": 0.5,
             "groups_mixed": 0.25, "groups_all_right": 0.25}
            for i in (1, 2, 3)
        ]  # fmt: skip
        evaluations = [{"step": s, "pass@1": 0.5, "pass@8": 0.75} for s in (0, 1, 3)]
        for step, counts in ((0, [0, 1, 4, 8]), (3, right_of(gamma))):
            for host in (0, 1):  # each has every other problem
                lines = [
                    json.dumps({"problem": p, "samples": 8, "correct": c}) + "\n"
                    for p, c in list(enumerate(counts))[host::2]
                ]
                (path / f"evaluation/step_{step}.{host}.jsonl").write_text("".join(lines))
        for name, records in (("metrics", steps), ("evals", evaluations)):
            text = "".join(json.dumps(record) + "\n" for record in records)
            (path / f"{name}.jsonl").write_text(text)
        (path / "summary.json").write_text("{}")
        return types.SimpleNamespace(returncode=0)

    return run


def main(folder, *flags):
    return compare.main(["--config", CONFIG, "--samples", "8", "--workdir", str(folder), *flags])


def test_runs_are_made_once_and_compared(tmp_path, monkeypatch):
    """gamma 0 ends with pass@1 of 4/8 on all problems, gamma 2 of 6/8."""
    made = []
    right_of = lambda gamma: [4, 4, 4, 4] if gamma == 0 else [6, 6, 6, 6]
    monkeypatch.setattr(compare.subprocess, "run", pretend(made, right_of))
    assert main(tmp_path, "--gammas", "0,2", "--seeds", "1") == 0
    assert main(tmp_path, "--gammas", "0,2", "--seeds", "2") == 0
    assert made == [(0, 0), (2, 0), (0, 1), (2, 1)]
    rows = figures.read_csv(tmp_path / "compare.csv")

    def found(panel, gamma):
        return {
            row["x"]: (row["value"], row["low"], row["high"])
            for row in rows
            if (row["panel"], row["gamma"]) == (panel, gamma)
        }

    assert found("pass@k", 0)[1] == (0.5, 0.5, 0.5) and found("pass@k", 2)[1][0] == 0.75
    assert found("pass@k", -1)[1][0] == pytest.approx(13 / 32)
    assert found("gain", 2)[1] == (0.25, 0.25, 0.25) and found("gain", 2)[8] == (0, 0, 0)
    assert found("pass@1 by difficulty", -1)["10 to 50 % (1)"][0] == 0.125
    assert found("entropy", 0) == {1: (1, 1, 1), 2: (0.5,) * 3, 3: pytest.approx((0.333333,) * 3)}
    assert (tmp_path / "compare.png").read_bytes()[:4] == b"\x89PNG"


def test_a_run_that_fails_ends_it_with_its_code(tmp_path, monkeypatch):
    failing = lambda line: types.SimpleNamespace(returncode=75)
    monkeypatch.setattr(compare.subprocess, "run", failing)
    assert main(tmp_path) == 75


@pytest.mark.parametrize(
    "flags, says",
    [
        (["--gammas", "0,x"], "--gammas is '0,x': give numbers joined by commas"),
        (["--seeds", "0"], "--seeds and --samples must be above 0"),
        (["--fast"], "unknown flag --fast: settings are given as --config.KEY=VALUE"),
        (["--config.stepz=3"], "there is no config key 'stepz'; did you mean 'steps'?"),
    ],
)
def test_mistakes(tmp_path, capsys, flags, says):
    assert main(tmp_path, *flags) == 2
    assert says in capsys.readouterr().err


def test_other_samples_than_it_was_made_with(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compare.subprocess, "run", pretend([], lambda gamma: [0, 0, 0, 0]))
    assert main(tmp_path, "--gammas", "0", "--seeds", "1") == 0
    assert main(tmp_path, "--gammas", "0", "--seeds", "1", "--samples", "16") == 2
    assert "has 8 samples a problem, not 16: give another --workdir" in capsys.readouterr().err
