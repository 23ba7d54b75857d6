"""Judges that others keep, each package imported when it is used: score(problem, response,
finished) -> Score. No jax here.

    reasoning_gym:T       the task's own; right at a score of 1
    ifeval, ifeval_loose  lm_eval's: whether all instructions of IFEval's prompt are followed
    synlogic              SynLogic's, by the puzzle's kind
"""

import importlib
import json
import re
from types import SimpleNamespace
from typing import Any

from fgrpo_jax.answers import Reward, Score, after_thinking, stated_answer, verdict

NEEDS = {  # by name, what makes it importable
    "reasoning_gym": "install the extra: pip install 'fgrpo_jax[tasks]'",
    "ifeval": "install the extra: pip install 'fgrpo_jax[ifeval]'",
    "ifeval_loose": "install the extra: pip install 'fgrpo_jax[ifeval]'",
    "synlogic": "put a clone of MiniMax-AI/SynLogic, with its requirements, on PYTHONPATH",
}


def find(name: str) -> Reward:
    """The judge of a name of NEEDS, reasoning_gym's with its task; ImportError without its
    package."""
    kind, _, task = name.partition(":")
    if kind == "reasoning_gym":
        return _reasoning_gym(task)
    return _synlogic() if kind == "synlogic" else _ifeval(kind == "ifeval_loose")


def _reasoning_gym(task: str) -> Reward:
    reasoning_gym: Any = importlib.import_module("reasoning_gym")

    score_answer: Any = reasoning_gym.get_score_answer_fn(task)

    def score(problem: Any, response: str, finished: bool) -> Score:
        answer = stated_answer(response)
        if answer is None:
            return Score(0.0, False, "no answer")
        return verdict(score_answer(answer, problem.data) == 1.0)

    return score


def _ifeval(loose: bool) -> Reward:
    """Of problem.data with IFEval's instruction_id_list and kwargs. Loose: also without the first
    line, the last one, or stars."""
    lm_eval: Any = importlib.import_module("lm_eval.tasks.ifeval.utils")
    kind = "loose" if loose else "strict"
    follows: Any = getattr(lm_eval, f"test_instruction_following_{kind}")

    def score(problem: Any, response: str, finished: bool) -> Score:
        answer = after_thinking(response)
        if answer is None:
            return Score(0.0, False, "no answer")
        asked = SimpleNamespace(
            key=0,
            prompt=problem.text,
            instruction_id_list=problem.data["instruction_id_list"],
            kwargs=problem.data["kwargs"],
        )
        return verdict(follows(asked, answer).follow_all_instructions)

    return score


def _synlogic() -> Reward:
    """Of problem.data with SynLogic's data_source and game_data_str; the answer is what stands in
    the last <answer></answer>, or else the whole response."""
    classes: Any = importlib.import_module("task2verifier").verifier_classes  # pyright: ignore
    data_of: Any = importlib.import_module("base.data").Data  # pyright: ignore

    def score(problem: Any, response: str, finished: bool) -> Score:
        answer = after_thinking(response)
        if answer is None:
            return Score(0.0, False, "no answer")
        tagged = re.findall(r"<answer>(.*?)</answer>", answer, re.DOTALL)
        puzzle = data_of(**json.loads(problem.data["game_data_str"]))
        verifier = classes[problem.data["data_source"].rpartition("/")[2]]()
        return verdict(bool(verifier.verify(puzzle, tagged[-1].strip() if tagged else answer)))

    return score
