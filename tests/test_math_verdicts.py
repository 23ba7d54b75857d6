"""Verdicts from public reports of wrong ones, by the rewards of the config."""

import json
import os
import pathlib
import time

import pytest
from conftest import DATA
from hypothesis import given, settings
from hypothesis import strategies as st

from fgrpo_jax.rewards import Scorer
from fgrpo_jax.structs import Problem

PATH = pathlib.Path(os.environ.get("FGRPO_MATH_CASES", DATA / "math_verdicts.jsonl"))
CASES = [json.loads(line) for line in PATH.read_text().splitlines() if line.strip()]
DECIDED = {  # policy cases that are decided against the report: gold -> why
    r"\frac{1}{\sqrt{n}}": "equal to the answer for n > 0 only, which nobody said",
}
OURS = {
    json.loads(line)["gold"] for line in (DATA / "math_verdicts.jsonl").read_text().splitlines()
}
LIMIT = 3.0  # seconds an answer


@pytest.fixture(scope="module")
def scorers():
    with Scorer("math", 2, LIMIT) as math, Scorer("gsm8k", 2, LIMIT) as gsm8k:
        yield {"math": math, "gsm8k": gsm8k}


def verdict(scorers, case):
    response = case.get("response") or rf"\boxed{{{case['pred']}}}"
    # without a box an answer can be right only where the task asks for other forms
    scorer = scorers["math" if r"\boxed" in response else "gsm8k"]
    (score,) = scorer.score([Problem("", case["gold"])], [response], [True])
    return score


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['cat']}-{case['id']}")
def test_case(scorers, case):
    began = time.monotonic()
    score = verdict(scorers, case)
    decided_otherwise = case.get("policy", False) and case["gold"] in DECIDED
    if not case.get("policy") or case["gold"] in OURS:  # another file's choices are its own
        assert score.correct is (case["expect"] is not decided_otherwise), score
    assert time.monotonic() - began < LIMIT + 8  # and the start of a new worker
    assert "FGRPO_CANARY" not in os.environ


def test_hangs_leave_the_pool_healthy(scorers):
    hangs = [case for case in CASES if case["cat"] == "hang"]
    boxed = [rf"\boxed{{{case['pred']}}}" for case in hangs]
    problems = [Problem("", case["gold"]) for case in hangs]
    easy = [Problem("", r"\sqrt{8}")] * 4
    out = scorers["math"].score(
        [*problems, *easy], [*boxed, *[r"\boxed{2\sqrt{2}}"] * 4], [True] * (len(hangs) + 4)
    )
    assert [score.correct for score in out] == [False] * len(hangs) + [True] * 4


PIECES = r"""1 2 30 0.5 x y n \frac \sqrt \pi \text \left( \right) { } { } ( ) [ ] + - * / ^ _ = <
\le , ; \{ \} \infty \cdot \\ & % $ # ! | \sum \int \begin{pmatrix} \end{pmatrix} \boxed{ \in é"""
TEXT = st.lists(st.sampled_from(PIECES.split()), max_size=12).map("".join)


@settings(deadline=None, max_examples=60)
@given(gold=TEXT, answer=TEXT, lead=TEXT)
def test_any_text_gets_a_verdict(scorers, gold, answer, lead):
    """Never an exception, never past the limit, and a gold is always equal to itself."""
    problem = Problem("", gold)
    began = time.monotonic()
    scorers["math"].score([problem], [rf"{lead}\boxed{{{answer}}}"], [True])
    scorers["gsm8k"].score([problem], [f"{lead} {answer}"], [False])
    assert time.monotonic() - began < 2 * LIMIT + 16
    balanced = all(gold[:i].count("{") >= gold[:i].count("}") for i in range(len(gold) + 1))
    if (
        gold.strip(" $.")
        and balanced
        and gold.count("{") == gold.count("}")
        and "boxed" not in gold
    ):
        (score,) = scorers["math"].score([problem], [rf"\boxed{{{gold}}}"], [True])
        assert score.correct or score.info == "no answer", gold
