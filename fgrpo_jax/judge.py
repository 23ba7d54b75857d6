"""The shipped rewards: score(problem, response, finished) -> Score. No jax here.

    math             the last \\boxed{}, by math-verify and the guards below
    gsm8k            the same of a box, of what follows ####, or of "the answer is"
    number           the last number, exactly
    multiple_choice  the letter
    exact            the whole response
    maze             the actions up to DONE: the maze's own path
    maze_simulate    the same: any that lead to the goal and into no wall, detours included
    reasoning_gym:T  and ifeval, ifeval_loose, synlogic: judges that others keep, as verifiers.py
    module:function  a user's own, of the same form

`problem` has text, answer, kind, worked and data (what else its source knows). All but the quick
part run in a worker that can be killed; model output is never evaluated as code.

What math decides where opinions differ: numbers must be equal, however the gold was rounded;
percent signs and units may be left out; a list of roots is unordered; words may differ in case;
`y = 3` and 3 answer each other, as do an inequality and an interval; what is equal only for
positive variables is wrong; without a box there is no answer.
"""

import importlib
import re
from typing import Any

from fgrpo_jax import verifiers
from fgrpo_jax.answers import (
    EXTRACT,
    MAX_ANSWER,
    Reward,
    Score,
    last_number,
    normalise,
    plain_number,
    quick_verdict,
    reaches,
    verdict,
)

ALGEBRA = ("math", "gsm8k")  # may need math-verify


def gold_of(reward: str, answer: str) -> str:
    """The gold in the form that is compared."""
    if reward == "number":
        return last_number(answer) or answer
    if reward == "multiple_choice":
        return normalise(answer).strip("() .").upper()
    if reward == "gsm8k":
        return answer.rpartition("####")[2].strip()
    return answer


def quick_score(reward: str, problem: Any, response: str, finished: bool) -> Score | None:
    """The score where text alone decides it; None where a worker must look."""
    if reward not in EXTRACT:
        return None
    answer = EXTRACT[reward](response)
    if answer is None:
        return Score(0.0, False, "no answer")
    if reward == "maze":
        return verdict(answer == problem.answer)
    if reward == "maze_simulate":
        return verdict(reaches(problem.text, answer))
    gold = gold_of(reward, problem.answer)
    if reward == "exact" and answer == gold.strip():
        return verdict(True)
    if len(answer) > MAX_ANSWER:
        return verdict(False)
    known = quick_verdict(gold, answer)
    if known is None and (reward not in ALGEBRA or "__" in answer):  # no answer, but Python's
        known = False
    return None if known is None else verdict(known)


def find(reward: str) -> Reward:
    """The reward of a name; ImportError or AttributeError where there is none."""
    if reward in EXTRACT:
        return lambda problem, response, finished: (
            quick_score(reward, problem, response, finished)
            or _algebra(gold_of(reward, problem.answer), EXTRACT[reward](response) or "")
        )
    module, _, name = reward.partition(":")
    if module in verifiers.NEEDS:
        return verifiers.find(reward)
    found: Reward = getattr(importlib.import_module(module), name)
    if not callable(found):
        raise TypeError(f"{reward} is no function")
    return found


def plain(gold: str) -> bool:
    """Whether a gold is a number that needs no algebra."""
    return plain_number(normalise(gold)) is not None


def parses(gold: str) -> bool:
    """Whether math-verify reads a gold, whose braces must match, and finds it equal to itself."""
    depth, lowest = 0, 0
    for brace in re.findall(r"(?<!\\)[{}]", gold):
        depth += 1 if brace == "{" else -1
        lowest = min(lowest, depth)
    if depth or lowest or r"\boxed" in gold:
        return False
    return bool(_parse(gold)) and _algebra(gold, gold).correct


def _parse(text: str) -> list[Any]:
    from math_verify import LatexExtractionConfig, parse

    # Its own time limits are signals, which the worker's timer makes needless.
    options: Any = {"parsing_timeout": None, "raise_on_error": False}
    options["extraction_config"] = [LatexExtractionConfig(boxed_match_priority=0)]
    return parse(rf"\boxed{{{text}}}", **options)


def _algebra(gold: str, answer: str) -> Score:
    """math-verify's verdict, guarded; only to be called in a worker."""
    gold, answer = _readable(gold), _readable(answer)
    if gold == answer:
        return verdict(True)
    golds, answers = _parse(gold), _parse(answer)
    if not answers:
        return Score(0.0, False, "unparsable")
    correct = _verify(golds, answers)
    if not correct and re.search(r"[<>]|\\[lg]eq?(?![A-Za-z])|\\in(?![A-Za-z])", answer):
        correct = _verify(answers, golds)  # it reads inequalities as sets in the gold alone
    return verdict(correct and not _falsely_equal(gold, answer, golds, answers))


def _verify(golds: list[Any], answers: list[Any]) -> bool:
    from math_verify import verify

    options: Any = {"timeout_seconds": None, "raise_on_error": False}
    return bool(verify(golds, answers, **options))


def _readable(text: str) -> str:
    """Normalised, and what models write in plain text as LaTeX: pi, *."""
    text = re.sub(r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi", normalise(text, unwrap=False))
    return text.replace("*", r" \cdot ")


def _falsely_equal(gold: str, answer: str, golds: list[Any], answers: list[Any]) -> bool:
    """Pairs that math-verify takes for equal: (1,2) for {1,2}, and numbers that agree in their
    first six decimals alone."""
    shapes = ("(", "["), (r"\{", "{")
    kinds = [
        next((i for i, opening in enumerate(shapes) if text.startswith(opening)), None)
        for text in (gold, answer)
    ]
    if None not in kinds and kinds[0] != kinds[1]:
        return True
    values = [_value(parsed) for parsed in (golds, answers)]
    if None in values:
        return False
    a, b = values
    return abs(a - b) > 1e-5 * max(abs(a), abs(b))


def _value(parsed: list[Any]) -> Any:
    """A constant's value to thirty digits, or None."""
    import sympy

    constant = parsed[0]
    if not isinstance(constant, sympy.Expr) or constant.free_symbols:
        return None
    value = constant.evalf(30)
    return value if value.is_number and value.is_finite else None
