"""What training did to rare right answers: chosen by hand, likelihoods against the sampler's."""

import json
import pathlib

import numpy as np
import pytest

from fgrpo_jax import evaluate, jsons
from fgrpo_jax.experiments import rare_nll

CONFIG = str(pathlib.Path(__file__).parents[1] / "configs/tiny_arithmetic_focal.py")
EMBEDDED = "embedded:tiny_arithmetic"
N = 8


def run(workdir, *flags):
    argv = ["--config", CONFIG, "--workdir", str(workdir), "--samples", str(N), "--prompts", "12"]
    sizes = ["--config.learn.microbatch=16", "--config.data.source=arithmetic:2+1+1"]
    return rare_nll.main([*argv, "--share", "0.2", *sizes, *flags])


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Against itself, and against a model whose logits are another temperature's."""
    from fgrpo_jax import export, sharding, weights

    folder = tmp_path_factory.mktemp("colder") / "policy"
    start = weights.resolve(EMBEDDED)
    policy = weights.Policy(weights.model_config(start))
    params = weights.load(start, policy, sharding.make_mesh(1, 8, 1))
    params = params | {"norm": {"weight": params["norm"]["weight"] * 2}}  # logits twice as large
    export.export(folder, params, start)
    workdir = tmp_path_factory.mktemp("run")
    assert run(workdir, "--trained", EMBEDDED, "--trained", str(folder)) == 0
    return workdir, folder


def right_file(workdir):
    (path,) = workdir.glob("right.*.jsonl")
    return path


def lines(workdir):
    return [jsons.parse(line) for line in jsons.read_lines(right_file(workdir))]


def test_the_base_agrees_with_what_sampled(done):
    """Trained nothing: no change; and the program of the update gives the sampler's numbers."""
    workdir, folder = done
    result = json.loads((workdir / "rare_nll.json").read_text())
    right = [record for record in lines(workdir) if "nll" in record]
    assert 10 < len(right) == result["right"] < 12 * N
    rare = sorted((record["nll"] for record in right), reverse=True)[: result["rare"]]
    assert result["rare"] == round(0.2 * len(right))
    assert result["base"] == pytest.approx(np.mean(rare), abs=1e-5)
    assert result["trained"][EMBEDDED] == {"change": 0.0, "low": 0.0, "high": 0.0}
    colder = result["trained"][str(folder)]  # what is rare becomes rarer
    assert 0 < colder["low"] < colder["change"] < colder["high"]


def test_done_prompts_are_not_sampled_again(done, tmp_path, monkeypatch):
    workdir, _ = done
    text = right_file(workdir).read_text().splitlines(keepends=True)
    ends = [i for i, line in enumerate(text) if "done" in line]
    cut = "".join(text[: ends[4] + 2]) + '{"problem": 1'
    (tmp_path / right_file(workdir).name).write_text(cut)
    asked = []
    real = evaluate.Sampler.stream

    def stream(self, columns, samples, sampling):
        inner = real(self, columns, samples, sampling)
        return lambda params, batch, key: (
            asked.extend(batch.position_P[batch.length_P > 0].tolist()), inner(params, batch, key)
        )[1]  # fmt: skip

    monkeypatch.setattr(evaluate.Sampler, "stream", stream)
    assert run(tmp_path, "--trained", EMBEDDED) == 0
    finished = {json.loads(text[i])["problem"] for i in ends[:5]}
    assert set(asked) == set(range(12)) - finished
    key = lambda record: (record["problem"], record.get("tokens", []))
    ours, theirs = (sorted(lines(folder), key=key) for folder in (tmp_path, workdir))
    assert [key(record) for record in ours] == [key(record) for record in theirs]


def test_the_rarest_by_hand():
    found = [{"problem": i, "nll": nll, "tokens": [i]} for i, nll in enumerate([0.1, 3, 2, 3, 0])]
    assert [right["problem"] for right in rare_nll.rarest(found, 0.5)] == [1, 3]
    assert [right["problem"] for right in rare_nll.rarest(found, 0.001)] == [1]
    assert len(rare_nll.rarest(found, 1.0)) == 5


def test_the_interval_draws_problems_whole():
    """One problem alone has no spread, however its responses differ; of two, the mean of both."""
    assert rare_nll.interval(np.array([1.0, 5.0]), np.array([7, 7])) == (3.0, 3.0)
    low, high = rare_nll.interval(np.array([1.0, 1.0, 4.0]), np.array([0, 0, 1]))
    assert (low, high) == (1.0, 4.0)


@pytest.mark.parametrize(
    "flags, says",
    [
        (["--share", "0"], "--share must be above 0"),
        (["--share", "nan"], "--share must be above 0"),
        (["--prompts", "0"], "--prompts and --samples must be above 0"),
        (["--trained", "nowhere"], "--trained is nowhere: there is no"),
    ],
)
def test_mistakes(tmp_path, flags, says, capsys):
    assert run(tmp_path, "--trained", EMBEDDED, *flags) == 2
    assert says in capsys.readouterr().err
