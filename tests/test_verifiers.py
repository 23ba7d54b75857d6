"""Judges that others keep: IFEval's against rules checked by hand, SynLogic's through a stand-in of
its two modules."""

import importlib.util
import json

import pytest

from fgrpo_jax import UserError, rewards
from fgrpo_jax.structs import Problem

needs_lm_eval = pytest.mark.skipif(
    not importlib.util.find_spec("lm_eval"), reason="needs the extra ifeval"
)


def ifeval(*instructions):
    names, kwargs = zip(*instructions, strict=True)
    return Problem("?", "", data={"instruction_id_list": list(names), "kwargs": list(kwargs)})


COMMAS = ("punctuation:no_comma", {})
PLACES = ("detectable_content:number_placeholders", {"num_placeholders": 2, "frequency": None})
TITLE = ("detectable_format:title", {})


FOLLOWED = (  # problem, response, whether strictly, whether loosely
    (ifeval(COMMAS), "no comma here", True, True),
    (ifeval(COMMAS), "one, comma", False, False),
    (ifeval(COMMAS), "Sure, here it is:\nno comma here", False, True),  # but for the first line
    (ifeval(PLACES), "[name] lives in [town]", True, True),
    (ifeval(PLACES), "[name] lives here", False, False),
    (ifeval(COMMAS, PLACES), "[name] lives in [town]", True, True),
    (ifeval(COMMAS, PLACES), "[name], who lives in [town]", False, False),  # one of two
    (ifeval(TITLE), "<<A title>> and a text", True, True),
    (ifeval(COMMAS), "<think>a, b</think>no comma here", True, True),
    (ifeval(COMMAS), "<think>never ends", False, False),
    (ifeval(COMMAS), "", False, False),
)


@needs_lm_eval
@pytest.mark.parametrize("reward", ["ifeval", "ifeval_loose"])
def test_ifeval(reward):
    problems, responses, strict, loose = zip(*FOLLOWED, strict=True)
    with rewards.Scorer(reward, 1, 60.0) as scorer:
        scores = scorer.score(problems, responses, [True] * len(problems))
    assert all(score.info in ("right", "wrong", "no answer") for score in scores)
    assert [s.correct for s in scores] == list(strict if reward == "ifeval" else loose)


def test_synlogic(tmp_path, monkeypatch):
    """The stand-in's puzzle is right where the answer is its own, stripped of nothing."""
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "__init__.py").write_text("")
    (tmp_path / "base" / "data.py").write_text(
        "class Data:\n"
        "    def __init__(self, question, answer, difficulty=1, metadata=None, **kwargs):\n"
        "        self.question, self.answer, self.metadata = question, answer, metadata\n"
    )
    (tmp_path / "task2verifier.py").write_text(
        "class Echo:\n"
        "    def verify(self, data, test_answer):\n"
        "        print('noise, as the real ones make')\n"
        "        return test_answer == data.answer + str(data.metadata['n'])\n"
        "verifier_classes = {'echo': Echo}\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    game = {"question": "?", "answer": "a", "difficulty": 2, "metadata": {"n": 7}}
    data = {"data_source": "val/echo", "game_data_str": json.dumps(game)}
    responses = {
        "a7": True,
        "so <answer>b</answer>, no: <answer> a7 </answer>": True,
        "<think>a7</think> <answer>a8</answer>": False,
        "it is a7": False,
        "<think>a7": False,
    }
    with rewards.Scorer("synlogic", 1, 60.0) as scorer:
        problems = [Problem("?", "", data=data)] * len(responses)
        scores = scorer.score(problems, list(responses), [True] * len(responses))
    assert [score.correct for score in scores] == list(responses.values())


@pytest.mark.parametrize(
    "reward, mend",
    [
        ("synlogic", "put a clone of MiniMax-AI/SynLogic, with its requirements, on PYTHONPATH"),
        ("ifeval", r"pip install 'fgrpo_jax\[ifeval\]'"),
    ],
)
def test_a_package_that_lacks(reward, mend, monkeypatch):
    module = {"synlogic": "task2verifier", "ifeval": "lm_eval"}[reward]
    if importlib.util.find_spec(module):
        pytest.skip(f"{module} is here")
    with pytest.raises(UserError, match=f"No module named '{module}.*{mend}"):
        rewards.Scorer(reward, 1, 1.0)
