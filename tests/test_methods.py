"""Each fragment of configs/methods in a run: it runs, and does what it says."""

import io
import json
import pathlib

import jax
import numpy as np
import pytest
from rich.console import Console

import fgrpo_jax
from fgrpo_jax import UserError, arithmetic, build, config, train

ROOT = pathlib.Path(fgrpo_jax.__file__).parents[1]
METHODS = sorted(path.stem for path in (ROOT / "configs/methods").glob("*.py"))
METHODS.remove("smoke")  # no method, but sizes: test_recipes.py
SMALL = (
    "steps=2 rollout.prompts=8 learn.minibatch=4 learn.epochs=2 algo.group_size=8 "
    "rollout.max_response=14 rollout.chunk=14 eval.every=0 eval.problems=1 eval.samples=1 "
    "optim.lr=1e-3 optim.warmup=1 optim.decay_start=0 optim.decay_end=0 score.workers=1"
).split()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """run(methods, overrides) -> the config, the records of both steps, the trained weights."""
    folder = tmp_path_factory.mktemp("methods")
    problems = arithmetic.generate(64, "train", "2-1,2+1,2+2,2*1")  # from easy to hard
    rows = [{"problem": problem.text, "answer": problem.answer} for problem in problems]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    small = folder / "small.py"
    source = f"'jsonl:{folder / 'data.jsonl'}'"
    settings = [*SMALL, f"data.source={source}", f"data.eval_source={source}"]
    body = "\n".join(f"    c.{setting}" for setting in settings)
    small.write_text(
        "from fgrpo_jax import config\n\n"
        f"def get_config():\n    c = config.default()\n{body}\n    return c\n"
    )

    def run(*methods, overrides=(), name=None):
        files = [str(ROOT / f"configs/methods/{name}.py") for name in methods]
        c = config.load(str(small), overrides, files)
        workdir = folder / (name or "_".join(("w", *methods, *overrides)))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jax, "device_count", lambda: 1)  # compiles in half the time
            train.train(c, workdir, Console(file=io.StringIO()))
        records = [json.loads(x) for x in (workdir / "metrics.jsonl").read_text().splitlines()]
        return c, records, (workdir / "policy/model.safetensors").read_bytes()

    return run


@pytest.fixture(scope="module")
def plain(run):
    return run()


REPORTED = {  # what a method adds to the record
    "tis": "importance_weight",
    "tis_sequence": "importance_weight",
    "icepop": "importance_weight",
    "masked_sequence": "importance_weight",
    "kl_loss": "kl",
    "disco": "kl",
    "lambda_grpo": "lambda",
}


@pytest.mark.parametrize("name", METHODS)
def test_each_method_runs_and_matters(run, plain, name):
    c, records, policy = run(name)
    assert [record["step"] for record in records] == [1, 2]
    assert all(np.isfinite(record["loss"] + record["grad_norm"]) for record in records)
    assert any(record["grad_norm"] > 0 for record in records)
    assert REPORTED.get(name, "loss") in records[0] and "lambda" not in plain[1][0]
    losses = lambda records: [record["loss"] for record in records]
    assert policy != plain[2] or losses(records) != losses(plain[1])


def test_methods_go_together(run):
    """Sequence ratios, drift weights, a KL penalty, PODS and an overlong penalty in one run."""
    c, records, _ = run("gspo", "tis_sequence", "kl_loss", "pods", "overlong", "rloo")
    assert (c.algo.name, c.rollout.subset, c.algo.group_size) == ("gspo", 8, 32)
    for record in records:
        assert record["kl"] >= 0 and 0.99 < record["importance_weight"] < 1.01
        assert np.isfinite(record["loss"]) and record["grad_norm"] > 0


def test_kl_in_the_reward_moves_the_second_step(run):
    """At the first step policy and reference are one; then the policy has moved away."""
    base = run("mask_truncated")[1]
    pulled = run("kl_reward", "mask_truncated", overrides=("kl.coef=1",))[1]
    assert abs(pulled[1]["loss"] - base[1]["loss"]) > 1e-3


def test_dynamic_sampling_reports_and_goes_on_where_it_was(run):
    one = {"overrides": ("steps=4",), "name": "whole"}
    _, whole, policy = run("dynamic_sampling", **one)
    run("dynamic_sampling", name="parts")
    _, parts, again = run("dynamic_sampling", **(one | {"name": "parts"}))
    numbers = "loss grad_norm prompts_drawn reward".split()
    assert [[r[n] for n in numbers] for r in parts] == [[r[n] for n in numbers] for r in whole]
    assert policy == again
    assert max(record["prompts_drawn"] for record in whole) > 8
    for record in whole:
        shares = [record[f"groups_{kind}"] for kind in ("all_wrong", "mixed", "all_right")]
        assert sum(shares) == pytest.approx(1) and shares[1] * record["prompts_drawn"] >= 8


def test_random_rewards_go_on_where_they_were(run, plain):
    """Bit for bit, and the pass rate stays that of the answers."""
    _, whole, policy = run("random_rewards", overrides=("steps=4",), name="coins")
    run("random_rewards", name="coins_in_parts")
    _, parts, again = run("random_rewards", overrides=("steps=4",), name="coins_in_parts")
    numbers = "loss grad_norm pass_rate reward".split()
    assert [[r[n] for n in numbers] for r in parts] == [[r[n] for n in numbers] for r in whole]
    assert policy == again
    assert whole[0]["pass_rate"] == plain[1][0]["pass_rate"]


def test_when_no_batch_fills_what_was_learnt_is_kept(run, monkeypatch):
    make_draw = build.make_draw

    def tiring(*arguments):
        draw = make_draw(*arguments)

        def tired(params, position, key, watch):
            if position >= 1:
                raise UserError("10 batches of prompts gave 1 group")
            return draw(params, position, key, watch)

        return tired

    monkeypatch.setattr(build, "make_draw", tiring)
    with pytest.raises(UserError, match="gave 1 group"):
        run("rloo", name="tired")
    monkeypatch.undo()
    _, records, policy = run("rloo", name="tired")
    _, whole, expected = run("rloo", name="rested")
    assert policy == expected and len(records) == len(whole) == 2
