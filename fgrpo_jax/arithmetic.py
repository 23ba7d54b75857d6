"""The embedded task: arithmetic of mixed difficulty, with worked solutions. No jax.

A kind names the digits of each term and the operations between them: "2+3" adds a number of two
digits and one of three. Problems are a pure function of (split, seed, index), and no
problem of one split is ever one of the other, but for TABLES, of a hundred problems each: too few
to hold any out, they are left out of the test split unless they are asked for.
"""

import random
import re
import zlib

from fgrpo_jax import UserError
from fgrpo_jax.structs import Problem

TABLES = "1+1 1-1 1*1".split()
KINDS = (
    "2+1 2-1 2+2 2-2 2*1 3+1 3-1 3+2 3-2 3+3 3-3 3*1 4+2 4-2 4+4 2*2 "
    "1+1+1 1+1-1 1*1+1 2+1+1 2+2-1 2*1+1 2+2+2"
).split()
HELD_OUT = 8  # one problem in so many belongs to the test split


def generate(
    count: int, split: str, kinds: str = "", seed: int = 0, slips: float = 0.0
) -> list[Problem]:
    """`count` problems of the comma-separated kinds (empty: all), cycling through them.

    Args:
        split: "train" or "test".
        slips: chance that the worked solution of a six-digit problem ends in a wrong digit, as
            scraped ones would; it falls to 0 at two digits. Gold answers are always right.
    """
    every = TABLES + KINDS if split == "train" else KINDS
    names = kinds.split(",") if kinds else every
    for kind in names:
        if not re.fullmatch(r"[1-4]([-+*][1-4]){1,2}", kind):
            raise UserError(
                f"{kind!r} is no kind of arithmetic: write digits and operations as 2+3 or 1*1-2"
            )
    return [
        _problem(names[i % len(names)], split, f"{seed}/{split}/{i}", slips) for i in range(count)
    ]


def _problem(kind: str, split: str, key: str, slips: float) -> Problem:
    draw = random.Random(key)  # a string seeds by its SHA-512, alike on every platform
    digits, operations = re.findall(r"\d", kind), re.findall(r"\D", kind)
    while True:
        terms = [draw.randrange(10 ** (d - 1) if d > 1 else 0, 10**d) for d in map(int, digits)]
        text = "".join(f"{op}{term}" for op, term in zip(["", *operations], terms, strict=True))
        held_out = zlib.crc32(text.encode()) % HELD_OUT == 0
        if kind in TABLES or held_out == (split == "test"):
            break
    # From left to right, the product first: a kind has a product only in front or at the end.
    left = text
    worked = [left]
    while operations:
        i = operations.index("*") if "*" in operations else 0
        a, b = terms[i : i + 2]
        terms[i : i + 2] = [{"+": a + b, "-": a - b, "*": a * b}[operations.pop(i)]]
        worked.append("".join(f"{op}{t}" for op, t in zip(["", *operations], terms, strict=True)))
    answer = worked[-1]
    if draw.random() < slips * (sum(map(int, digits)) - 2) / 4:
        place = draw.choice([i for i, letter in enumerate(answer) if letter != "-"])
        worked[-1] = answer[:place] + draw.choice("0123456789") + answer[place + 1 :]
    return Problem(text, answer, kind, f"{'='.join(worked)}\n\\boxed{{{worked[-1]}}}")
