import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from fgrpo_jax import UserError
from fgrpo_jax.rewards import Scorer
from fgrpo_jax.structs import Problem


@pytest.fixture(scope="module")
def scorer():
    with Scorer("math", workers=2, timeout=2.0) as scorer:
        yield scorer


@pytest.mark.parametrize("reward", ["math", "gsm8k"])
def test_algebra_needs_math_verify(reward, monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(UserError, match=f"reward is '{reward}', which needs math-verify: pip inst"):
        Scorer(reward, 1, 1.0)
    with Scorer("number", 1, 1.0) as scorer:
        assert scorer.score([Problem("", "7")], ["it is 7"], [True])[0].correct


def score(scorer, golds, responses):
    problems = [Problem("", gold) for gold in golds]
    return scorer.score(problems, responses, [True] * len(golds))


def infos(scorer, golds, answers):
    return [s.info for s in score(scorer, golds, [rf"\boxed{{{a}}}" for a in answers])]


def test_sympy_judges(scorer):
    golds = ["1/2", "0.5", r"\sqrt{8}", "x^2+2x+1", "(1,2)", "1/2"]
    answers = [r"\frac{2}{4}", r"\frac12", r"2\sqrt{2}", "(x+1)^2", "(1, 3)", r"\frac13"]
    assert infos(scorer, golds, answers) == ["right"] * 4 + ["wrong"] * 2


def test_scores_are_in_order_whatever_happens(scorer):
    responses = [rf"\boxed{{{i % 3}}}" for i in range(60)]
    responses[7] = r"\boxed{9^{9^{9^{9}}}}"
    responses[8] = "no box"
    scores = score(scorer, ["1"] * 60, responses)
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


def test_number_takes_commas_in_the_gold_too():
    with Scorer("number", workers=1, timeout=1.0) as scorer:
        scores = score(scorer, ["1,234"] * 3, ["1234", "it is 1,234.0!", "123"])
    assert [s.correct for s in scores] == [True, True, False]


def test_exact():
    with Scorer("exact", workers=1, timeout=1.0) as scorer:
        scores = score(scorer, ["7"] * 5, ["7", " 7\n", "7.0", "7 apples", ""])
    assert [s.correct for s in scores] == [True, True, True, False, False]


def test_mazes():
    text = "GRID_START #####\n#s..#\n###.#\n###g#\n#####\nGRID_END PATH_START"
    responses = [
        "RIGHT RIGHT DOWN DOWN DONE",
        "RIGHT LEFT RIGHT RIGHT DOWN DOWN DONE",
        "RIGHT RIGHT DOWN DOWN UP DONE",
        "RIGHT DOWN DOWN DONE",
        "RIGHT RIGHT DOWN DOWN",
        "RIGHT RIGHT DOWN DOWN DONE DONE",
    ]
    problems = [Problem(text, "RRDD")] * len(responses)
    for reward, right in (("maze", [0, 5]), ("maze_simulate", [0, 1, 2, 5])):
        with Scorer(reward, workers=1, timeout=1.0) as scorer:
            assert not scorer._workers and scorer.check_golds(["RRDD", ""]) == [True, False]
            scores = scorer.score(problems, responses, [True] * len(responses))
        assert [i for i, score in enumerate(scores) if score.correct] == right
        assert scores[4].info == "no answer" and scores[3].info == "wrong"


def test_no_process_is_left():
    with Scorer("math", workers=1, timeout=2.0) as scorer:
        infos(scorer, [r"\sqrt{4}"], [r"\frac{4}{2}"])
        process = scorer._workers[0].process
    assert process.poll() is not None


ORPHAN = r"""
import sys, threading
from fgrpo_jax import rewards
from fgrpo_jax.structs import Problem
scorer = rewards.Scorer("math", 1, 3.0)
scorer.score([Problem("", r"\sqrt{4}")], [r"\boxed{\frac{4}{2}}"], [True])
print(scorer._workers[0].process.pid, flush=True)
scorer.score([Problem("", "7")], [r"\boxed{9^{9^{9^{9}}}}"], [True])
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


def test_gsm8k():
    golds = ["She has 6*7=42.\n#### 42"] * 4 + ["1,234"]
    responses = ["#### 42", r"\boxed{\frac{84}{2}}", "The answer is 41.", "42", "#### 1234"]
    with Scorer("gsm8k", workers=1, timeout=2.0) as scorer:
        out = score(scorer, golds, responses)
    assert [s.info for s in out] == ["right", "right", "wrong", "no answer", "right"]


def test_multiple_choice():
    with Scorer("multiple_choice", workers=1, timeout=1.0) as scorer:
        out = score(scorer, ["C", "(C)", "C", "C"], [r"\boxed{c}", "The answer is (C)", "D", "-"])
    assert [s.info for s in out] == ["right", "right", "wrong", "no answer"]


OWN = """
import os, time
from fgrpo_jax.answers import Score

def half(problem, response, finished):
    if response == "hang":
        time.sleep(60)
    if response == "die":
        os._exit(1)
    if response == "raise":
        raise ValueError("no such word")
    share = (problem.answer in response) / 2 + finished / 2
    return Score(share, share == 1, "right" if share == 1 else "wrong")
"""


def test_a_user_s_own_reward(tmp_path, monkeypatch, capsys):
    (tmp_path / "own_reward.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Scorer("own_reward:half", workers=1, timeout=1.0) as scorer:
        problems = [Problem("", "yes")] * 6
        responses = ["oh yes", "hang", "no", "die", "raise", "yes"]
        out = scorer.score(problems, responses, [True, True, True, True, True, False])
    assert [s.reward for s in out] == [1, 0, 0.5, 0, 0, 0.5]
    assert [s.correct for s in out] == [True, False, False, False, False, False]
    assert [s.info for s in out] == ["right", "timed out", "wrong", "crashed", "crashed", "wrong"]
    assert (
        "warning: reward own_reward:half failed: ValueError: no such word"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "reward, message",
    [
        ("mathh", "reward is 'mathh' and cannot be found"),
        ("no_such_module:f", "must be one of math, gsm8k, number, multiple_choice, exact, maze"),
        ("os:no_such_function", "cannot be found"),
        ("os:sep", "cannot be found (os:sep is no function)"),
    ],
)
def test_unknown_rewards_get_one_sentence(reward, message):
    with pytest.raises(UserError) as error:
        Scorer(reward, 1, 1.0)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_reasoning_gym():
    pytest.importorskip("reasoning_gym")
    import reasoning_gym

    entry = reasoning_gym.create_dataset("leg_counting", size=1, seed=1)[0]
    problem = Problem(entry["question"], entry["answer"], data=entry)
    with Scorer("reasoning_gym:leg_counting", workers=1, timeout=5.0) as scorer:
        right = rf"\boxed{{{entry['answer']}}}"
        out = scorer.score([problem] * 3, [right, r"\boxed{-1}", "?"], [True] * 3)
    assert [s.info for s in out] == ["right", "wrong", "no answer"]


def test_reasoning_gym_that_is_not_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UserError, match="install the extra"):
        Scorer("reasoning_gym:leg_counting", 1, 1.0)


def test_golds(scorer):
    golds = [
        "4",
        r"\frac{1}{2}",
        r"\text{Evelyn}",
        "[2,5)",
        "",
        "  ",
        "1+" * 300 + "1",
        r"\frac{1",
        "}{",
        r"\{1,2\}",
    ]
    assert scorer.check_golds(golds) == [*[True] * 4, *[False] * 5, True]
    with Scorer("exact", 1, 1.0) as exact:
        assert exact.check_golds(["x", ""]) == [True, False]


def test_unparsable_answers_are_told_apart(scorer):
    assert infos(scorer, [r"\sqrt{2}"], [r"\frac{"]) in (["no answer"], ["unparsable"], ["wrong"])


def test_throughput(scorer):
    """At least 500 easy and 20 algebraic verdicts a CPU-second; far from the limits when alone."""
    easy = [f"{i}/7" for i in range(2000)]
    began = time.process_time()
    assert infos(scorer, easy, easy) == ["right"] * 2000
    assert 2000 / (time.process_time() - began) > 500
    infos(scorer, [r"\sqrt{2}"] * 2, [r"\sqrt{3}"] * 2)  # both are up
    golds = [rf"\sqrt{{{i}}}+x^{i}" for i in range(2, 82)]
    answers = [rf"x^{i} + \sqrt{{{i}}}" for i in range(2, 82)]
    began = time.monotonic()
    assert infos(scorer, golds, answers) == ["right"] * 80
    rate = 80 / (time.monotonic() - began)
    print(f"{rate:.0f} algebraic verdicts a second by two workers")
    assert rate > 10  # two workers on a machine that may be busy
