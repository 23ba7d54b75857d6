"""What data.source, data.fields and profile.steps may say, taken apart. No file is opened here."""

import math
import re
from typing import NamedTuple

from fgrpo_jax import UserError

SOURCES = {
    "arithmetic": "arithmetic[:KINDS]",
    "jsonl": "jsonl:PATH",
    "parquet": "parquet:PATH",
    "tfds": "tfds:NAME[:CONFIG]/SPLIT",
    "hf": "hf:NAME[:CONFIG]/SPLIT",
    "maze": "maze:SIZE[xCOUNT]",
    "reasoning_gym": "reasoning_gym:TASK",
}
GENERATED = ("arithmetic", "maze", "reasoning_gym")  # drawn by a program, so that repeats are meant
FIELDS = "problem answer kind worked data".split()

_KIND = rf"(?:{'|'.join(SOURCES)})(?=[:+]|$)"
# Arithmetic's kinds and file names may hold a plus too: one divides only in front of a source.
_PLUS = re.compile(rf"\+(?=(?:[^*:+]*\*)?{_KIND})")


class Part(NamedTuple):
    """One source of a mixture."""

    kind: str  # a key of SOURCES
    rest: str  # what follows its colon
    weight: float | None  # share of the prompts, up to a common factor; None: by size

    @property
    def source(self) -> str:
        return f"{self.kind}:{self.rest}" if self.rest else self.kind


def parts(source: str, name: str = "the source") -> list[Part]:
    """The sources of [WEIGHT*]SOURCE[+[WEIGHT*]SOURCE]...; UserError, which says `name`.

    >>> parts("0.7*jsonl:a.jsonl+0.3*arithmetic:2+3")[1]
    Part(kind='arithmetic', rest='2+3', weight=0.3)
    """
    found = [_part(text, name) for text in _PLUS.split(source)]
    if len({part.weight is None for part in found}) > 1:
        raise UserError(f"{name} is {source!r}: give each of its sources a weight, or none")
    return found


def _part(text: str, name: str) -> Part:
    weight = None
    if match := re.match(rf"([^*:+]*)\*(?={_KIND})", text):
        try:
            weight = float(match[1])
        except ValueError:
            weight = math.nan
        if not 0 < weight < math.inf:
            raise UserError(f"{name} has the weight {match[1]!r}: it must be a number above 0")
        text = text[match.end() :]
    kind, _, rest = text.partition(":")
    head, _, split = rest.rpartition("/")
    whole = bool(head and split) if kind in ("tfds", "hf") else bool(rest) or kind == "arithmetic"
    if kind not in SOURCES or not whole:
        forms = ", ".join(list(SOURCES.values())[:-1])
        raise UserError(
            f"{name} is {text!r}: it must be {forms} or {SOURCES['reasoning_gym']}, "
            "or several of them joined by +"
        )
    if kind == "maze":
        maze(rest, name)
    return Part(kind, rest, weight)


def maze(text: str, name: str = "the source") -> tuple[int, int | None]:
    """(squares a side, mazes or None) of SIZE[xCOUNT]; UserError, which says `name`.

    >>> maze("17x1000000")
    (17, 1000000)
    """
    match = re.fullmatch(r"([0-9]{1,2})(?:x([0-9]{1,9}))?", text)
    size, count = (int(match[1]), match[2]) if match else (0, None)
    if size < 5 or size % 2 == 0 or (count is not None and int(count) == 0):
        raise UserError(
            f"{name} is 'maze:{text}': write maze:SIZE or maze:SIZExCOUNT, as maze:17x1000, where "
            "SIZE is an odd number from 5 to 99 and COUNT is above 0"
        )
    return size, None if count is None else int(count)


def mapping(text: str) -> dict[str, list[str]]:
    """The file's fields by ours, of "problem=question,answer=target|gold"; a bar parts
    alternatives, of which a file has one. UserError where it is written otherwise.

    >>> mapping("answer=reward_model.ground_truth|gold")
    {'answer': ['reward_model.ground_truth', 'gold']}
    """
    found: dict[str, list[str]] = {}
    for item in text.split(",") if text else []:
        field, _, names = (word.strip() for word in item.partition("="))
        alternatives = [word.strip() for word in names.split("|")]
        if field not in FIELDS or field in found or not all(alternatives):
            raise UserError(
                f"data.fields has {item!r}: write FIELD=NAME once a field, joined by commas, where "
                f"FIELD is one of {', '.join(FIELDS)} and NAME is what the file calls it"
            )
        found[field] = alternatives
    return found


def steps(text: str) -> list[range]:
    """The steps of profile.steps, counted from 1: numbers and ranges, both ends included.
    UserError where it is written otherwise.

    >>> steps("1,3-5")
    [range(1, 2), range(3, 6)]
    """
    found = []
    for item in text.split(",") if text else []:
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", item)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= first <= last:
            raise UserError(
                f"profile.steps is {text!r}: write steps, the first of which is 1, as 3,4 or, from "
                "a lower to a higher one, as 3-5"
            )
        found.append(range(first, last + 1))
    return found
