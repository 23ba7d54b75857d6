import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from fgrpo_jax.rewards import Scorer, boxed_answer, last_number, quick_verdict


@pytest.fixture(scope="module")
def scorer():
    with Scorer("math", workers=2, timeout=2.0) as scorer:
        yield scorer


@pytest.mark.parametrize(
    "response, answer",
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{5} is wrong; \boxed{7}", "7"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{5} and then \boxed{7", None),
        (r"\boxed{5} and then \boxed{}", None),
        ("42", None),
        ("", None),
        (r"<think>\boxed{5}", None),
        (r"<think>\boxed{5}</think> \boxed{6}", "6"),
        (r"<think>\boxed{5}</think> none", None),
        (r"prompt opened it \boxed{5}</think>\boxed{8}", "8"),
    ],
)
def test_boxed_answer(response, answer):
    assert boxed_answer(response) == answer


@pytest.mark.parametrize(
    "gold, answer, verdict",
    [
        ("3", "3", True),
        ("3", " 3 ", True),
        ("3", "4", False),
        ("-3", "3", False),
        ("18", "18.00", True),
        ("16", "016", True),
        ("0.0000001", "0.0000002", False),
        ("1/2", r"\frac{1}{2}", None),
        ("x", "y", None),
        ("56", "5 6", None),
        ("11/2", "1 1/2", None),
        ("23", "２３", None),
        ("$5$", " 5 ", True),
    ],
)
def test_quick_verdict(gold, answer, verdict):
    assert quick_verdict(gold, answer) is verdict


def infos(scorer, golds, answers):
    return [s.info for s in scorer.score(golds, [rf"\boxed{{{a}}}" for a in answers])]


def test_sympy_judges(scorer):
    golds = ["1/2", "0.5", r"\sqrt{8}", "x^2+2x+1", "(1,2)", "1/2"]
    answers = [r"\frac{2}{4}", r"\frac12", r"2\sqrt{2}", "(x+1)^2", "(1, 3)", r"\frac13"]
    assert infos(scorer, golds, answers) == ["right"] * 4 + ["wrong"] * 2


def test_scores_are_in_order_whatever_happens(scorer):
    responses = [rf"\boxed{{{i % 3}}}" for i in range(60)]
    responses[7] = r"\boxed{9^{9^{9^{9}}}}"
    responses[8] = "no box"
    scores = scorer.score(["1"] * 60, responses)
    assert [s.correct for s in scores] == [i % 3 == 1 and i not in (7, 8) for i in range(60)]
    assert scores[7].info == "timed out" and scores[8].info == "no answer"
    assert all(s.reward == float(s.correct) for s in scores)


def test_a_hang_is_killed_and_the_pool_goes_on(scorer):
    began = time.monotonic()
    hang = r"2^{2^{2^{2^{2^{2}}}}}"
    assert infos(scorer, ["7", r"\sqrt{9}"], [hang, r"\frac{6}{2}"]) == ["timed out", "right"]
    assert time.monotonic() - began < 2.0 + 8.0  # the limit, and the start of a new worker
    assert infos(scorer, [r"\sqrt{16}"], [r"\frac{8}{2}"]) == ["right"]


def test_a_crash_is_told_apart(scorer):
    infos(scorer, [r"\sqrt{25}"] * 2, [r"\frac{10}{2}", r"\frac{15}{3}"])  # starts both
    for worker in scorer._workers:
        os.kill(worker.process.pid, signal.SIGKILL)
    out = infos(scorer, [r"\sqrt{36}"] * 2, [r"\frac{12}{2}", r"\frac{18}{3}"])
    assert set(out) <= {"crashed", "right"} and "crashed" in out
    assert infos(scorer, [r"\sqrt{49}"], [r"\frac{14}{2}"]) == ["right"]


def test_model_output_is_not_evaluated(scorer, monkeypatch):
    infos(scorer, ["1"], ["__import__('os').environ.update(FGRPO_INJECTED='1')"])
    assert "FGRPO_INJECTED" not in os.environ


def test_from_another_thread(scorer):
    out = []
    thread = threading.Thread(target=lambda: out.extend(infos(scorer, ["1/3"], [r"\frac{2}{6}"])))
    thread.start()
    thread.join()
    assert out == ["right"]


def test_long_answers_are_wrong(scorer):
    assert infos(scorer, ["1"], ["1+" * 300 + "1"]) == ["wrong"]


@pytest.mark.parametrize(
    "response, answer",
    [
        ("6 + 7 = 13", "13"),
        ("13.", "13"),
        ("it is -3, no: -4", "-4"),
        ("about 1,234.50 dollars", "1234.50"),
        ("none", None),
        ("4,5", "5"),
        ("12,345,678", "12345678"),
        ("", None),
    ],
)
def test_last_number(response, answer):
    assert last_number(response) == answer


def test_number_takes_commas_in_the_gold_too():
    with Scorer("number", workers=1, timeout=1.0) as scorer:
        scores = scorer.score(["1,234"] * 3, ["1234", "it is 1,234.0!", "123"])
    assert [s.correct for s in scores] == [True, True, False]


def test_exact():
    with Scorer("exact", workers=1, timeout=1.0) as scorer:
        scores = scorer.score(["7"] * 5, ["7", " 7\n", "7.0", "7 apples", ""])
    assert [s.correct for s in scores] == [True, True, True, False, False]


def test_no_process_is_left():
    with Scorer("math", workers=1, timeout=2.0) as scorer:
        infos(scorer, [r"\sqrt{4}"], [r"\frac{4}{2}"])
        process = scorer._workers[0].process
    assert process.poll() is not None


ORPHAN = r"""
import sys, threading
from fgrpo_jax import rewards
scorer = rewards.Scorer("math", 1, 3.0)
scorer.score([r"\sqrt{4}"], [r"\boxed{\frac{4}{2}}"])
print(scorer._workers[0].process.pid, flush=True)
scorer.score(["7"], [r"\boxed{9^{9^{9^{9}}}}"])
"""


def test_a_worker_outlives_a_killed_parent_by_its_limit_at_most():
    parent = subprocess.Popen([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    time.sleep(0.5)  # now it hangs in the power tower
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 6
    while time.monotonic() < deadline:
        try:
            stat = pathlib.Path(f"/proc/{worker}/stat").read_text()
        except OSError:
            return
        if stat.rpartition(")")[2].split()[0] == "Z":  # dead; who adopted it has not looked yet
            return
        time.sleep(0.1)
    pytest.fail(f"worker {worker} is still alive")


def test_a_pool_that_cannot_start_says_so(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with (
        Scorer("math", workers=1, timeout=1.0) as scorer,
        pytest.raises(RuntimeError, match="a reward worker cannot start"),
    ):
        infos(scorer, [r"\sqrt{4}"], ["2"])


def test_workers_load_no_jax():
    code = "import sys, fgrpo_jax.rewards; print('jax' in sys.modules, 'numpy' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split()[0] == "False"
