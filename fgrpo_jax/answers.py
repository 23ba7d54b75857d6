"""The answer in a response, and what can be said of it without an algebra system. No jax here."""

import dataclasses
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

VERDICTS = ("right", "wrong", "no answer", "unparsable", "timed out", "crashed")
BOXED = r"Please reason step by step, and put your final answer within \boxed{}."
MAX_ANSWER = 400  # characters; a longer answer is wrong

_DECIMAL = r"[0-9]{1,100}(?:\.[0-9]{1,100})?|\.[0-9]{1,100}"
_NUMBER = re.compile(rf"[-+]?(?:{_DECIMAL})(?:[eE][-+]?[0-9]{{1,3}})?")
_FRACTION = re.compile(
    r"([-+]?)(?:([0-9]{1,100})/([0-9]{1,100})|\\frac\{([0-9]{1,100})\}\{([0-9]{1,100})\})"
)
_MIXED = re.compile(
    r"([-+]?[0-9]{1,100}) *(?: ([0-9]{1,9})/([0-9]{1,9})|\\frac\{([0-9]{1,9})\}\{([0-9]{1,9})\})"
)
_POWER = re.compile(
    rf"([-+]?(?:{_DECIMAL})) *\\(?:times|cdot) *10\^(?:([0-9])|\{{([-+]?[0-9]{{1,3}})\}})"
)
_WRAPPERS = "text(?:rm|bf|it|normal)?|mathrm|mathbf|mbox|operatorname"
_THOUSANDS = re.compile(r"(?<![0-9,.])([0-9]{1,3}(?:,[0-9]{3})+)(?![0-9,])")


@dataclasses.dataclass(frozen=True)
class Score:
    """The verdict on one response."""

    reward: float  # what the advantage is made of, before shaping
    correct: bool  # raw: what the focal weight and pass@k are made of
    info: str  # one of VERDICTS


Reward = Callable[[Any, str, bool], Score]  # (problem, response, finished)


def verdict(correct: bool) -> Score:
    return Score(float(correct), correct, "right" if correct else "wrong")


def after_thinking(response: str) -> str | None:
    """What follows the last think block; None where one never closes."""
    if "<think>" in response and "</think>" not in response:
        return None
    return response.rpartition("</think>")[2]


def boxed_answer(response: str) -> str | None:
    r"""The inside of the last \boxed{} after the end of any think block, or None.

    None too where a think block or the last box never closes: an unfinished answer is no excuse
    to look earlier.

    >>> boxed_answer(r"\boxed{5} no, \boxed{\frac{1}{2}}")
    '\\frac{1}{2}'
    """
    answer = after_thinking(response) or ""
    start = answer.rfind(r"\boxed{")
    if start < 0:
        return None
    start += len(r"\boxed{")
    depth = 1
    for i in range(start, len(answer)):
        depth += {"{": 1, "}": -1}.get(answer[i], 0)
        if depth == 0:
            return answer[start:i].strip() or None
    return None


def stated_answer(response: str) -> str | None:
    r"""The answer as GSM8K's solutions and models at large state it, or None.

    The last box if there is one, whole or not; else what follows the last `####`; else what
    follows the last "the answer is", "answer:" or "final answer", to the end of its line, without
    markdown's stars, dollars and the full stop.

    >>> stated_answer("6 * 7 = 42\n#### 42")
    '42'
    >>> stated_answer("So the answer is **-3**.")
    '-3'
    """
    answer = after_thinking(response)
    if answer is None or r"\boxed" in answer:
        return boxed_answer(response)
    mark = r"####|(?i:\b(?:final answer|the answer is|answer)\b(?: is)?) *[:=]?|(?i:answer) *:"
    places = list(re.finditer(mark, answer))
    hashes = [place for place in places if place[0] == "####"]
    if not places:
        return None
    line = answer[(hashes or places)[-1].end() :].lstrip(" *\t:").split("\n", 1)[0]
    line = re.split(r"\.(?=\s|$)", line.replace("**", ""), maxsplit=1)[0]
    return line.strip(" *$") or None


def last_number(response: str) -> str | None:
    """The last number of a response, thousands' commas removed, or None.

    >>> last_number("4,000 - 5 is 3,995.")
    '3995'
    """
    numbers = re.findall(r"-?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?", response)
    return numbers[-1].replace(",", "") if numbers else None


def chosen_letter(response: str) -> str | None:
    r"""The letter of a multiple choice: boxed, or stated as "the answer is (C)", or alone.

    >>> chosen_letter(r"Thus \boxed{\text{(B)}}")
    'B'
    """
    answer = stated_answer(response)
    if answer is None and len(response.strip(" ().*$\n")) == 1:
        answer = response
    if answer is None:
        return None
    match = re.fullmatch(r"\(?([A-Za-z])(?:[).:].*)?", normalise(answer).strip("*$ "), re.DOTALL)
    return match[1].upper() if match else None


ACTIONS = {"UP": "U", "DOWN": "D", "LEFT": "L", "RIGHT": "R"}  # of a maze


def path(response: str) -> str | None:
    """The actions in front of the first DONE, a letter each; None without a DONE, or where
    anything else is among them.

    >>> path("RIGHT RIGHT DOWN DONE")
    'RRD'
    """
    words = response.split()
    if "DONE" not in words:
        return None
    letters = [ACTIONS.get(word, "") for word in words[: words.index("DONE")]]
    return "".join(letters) if all(letters) else None


def reaches(maze: str, path: str) -> bool:
    """Whether the letters of a path lead from the start of maze.generate's text to its goal,
    where the rest of them no longer counts, and into no wall.

    >>> reaches("#####\\n#s..#\\n###.#\\n###g#\\n#####\\n", "RRLRDDD")
    True
    """
    first = maze.find("\n")
    width = maze.find("\n", first + 1) - first
    step = {"U": -width, "D": width, "L": -1, "R": 1}
    at = maze.find("s")
    for letter in path:
        at += step[letter]
        square = maze[at : at + 1]
        if square == "g":
            return True
        if square not in (".", "s"):
            return False
    return False


EXTRACT: dict[str, Callable[[str], str | None]] = {  # the answer of each shipped reward
    "math": boxed_answer,
    "gsm8k": stated_answer,
    "number": last_number,
    "multiple_choice": chosen_letter,
    "exact": lambda response: response.strip() or None,
    "maze": path,
    "maze_simulate": path,
}
KEPT = ("ifeval", "ifeval_loose", "synlogic")  # judges that others keep, as verifiers.py
REWARDS = f"one of {', '.join((*EXTRACT, *KEPT))}, reasoning_gym:TASK or module:function"


def normalise(text: str, unwrap: bool = True) -> str:
    r"""The same answer in the plainest LaTeX: nothing is lost that could tell two answers apart.

    Spacing, \left and \right, dollars, \dfrac, thousands' commas, ordinal endings, a final full
    stop and, if to unwrap, \text{} and its like go; \frac12 gets its braces.

    >>> normalise(r"$\dfrac12,\!000\text{ m}$")
    '\\frac{1}{2},000 m'
    """
    text = text.strip().strip("$").strip()
    text = re.sub(r"\\(?:left|right|displaystyle|bigl?|bigr|Bigl?|Bigr)(?![A-Za-z])\.?", "", text)
    text = re.sub(r"(?<!\\)\\[!,;:>]|\\q?quad(?![A-Za-z])", "", text)
    text = re.sub(r"(?<!\\)\\ |~", " ", text)
    text = re.sub(r"\\[dtc]frac(?![A-Za-z])", r"\\frac", text)
    text = re.sub(r"\\frac *([0-9]) *([0-9])", r"\\frac{\1}{\2}", text)
    if unwrap:
        text = re.sub(rf"\\(?:{_WRAPPERS}) *\{{([^{{}}]*)\}}", r"\1", text)
    text = text.replace("{,}", ",")
    text = _THOUSANDS.sub(lambda match: match[1].replace(",", ""), text)
    text = re.sub(r"(?<=[0-9])\^?\{? *(?:st|nd|rd|th) *\}?$", "", text)
    text = re.sub(r"\s+", " ", text).strip()
    return text[:-1].rstrip() if text.endswith(".") else text


def plain_number(text: str) -> Fraction | None:
    r"""The exact value of a normalised integer, decimal, a \times 10^{n}, a/b, \frac{a}{b} or mixed
    number, or None.

    >>> plain_number("-1 1/2")
    Fraction(-3, 2)
    """
    if _NUMBER.fullmatch(text):
        return Fraction(text)
    if match := _POWER.fullmatch(text):
        return Fraction(match[1]) * Fraction(10) ** int(match[2] or match[3])
    if match := _FRACTION.fullmatch(text):
        sign, *parts = match.groups()
        above, below = (int(part) for part in parts if part is not None)
        return Fraction(above, below) * (-1 if sign == "-" else 1) if below else None
    if match := _MIXED.fullmatch(text):
        whole, *parts = match.groups()
        above, below = (int(part) for part in parts if part is not None)
        if above < below:  # 4 10/3 is no number
            return Fraction(whole) + Fraction(above, below) * (-1 if whole.startswith("-") else 1)
    return None


def quick_verdict(gold: str, answer: str) -> bool | None:
    """Equal strings once normalised, and two plain numbers compared exactly; else None.

    Words of several letters are equal whatever their case; single letters, as variables, are not.
    """
    gold, answer = normalise(gold), normalise(answer)
    squeezed = [text.replace(" ", "") for text in (gold, answer)]
    spaces_matter = re.search(r"[0-9A-Za-z] [0-9A-Za-z]", gold + "|" + answer)
    if gold == answer or (not spaces_matter and squeezed[0] == squeezed[1]):
        return bool(gold)
    if len(gold) > 1 and gold.replace(" ", "").isalpha() and answer.replace(" ", "").isalpha():
        return gold.casefold() == answer.casefold() or None
    numbers = plain_number(gold), plain_number(answer)
    if None in numbers:
        return None
    if numbers[0] == numbers[1]:
        return True
    decimals = ["." in text for text in (gold, answer)]
    fractions = ["/" in text or "frac" in text for text in (gold, answer)]
    # a decimal may be a fraction's rounded value, which is for the algebra system to say
    return None if decimals[0] and fractions[1] or decimals[1] and fractions[0] else False
