"""Mazes, with the path as worked solution. No jax.

A maze of SIZE x SIZE squares is a tree of the cells, its squares of odd row and column, grown by
randomised Prim from the start (1, 1): a random cell at the edge of what is open is joined to a
random open neighbour. So one simple path leads to the goal (SIZE - 2, SIZE - 2). Problems are a
pure function of (SIZE, split, seed, index); one maze in HELD_OUT, by a checksum of its text,
belongs to the test split and is never drawn for the other.
"""

import functools
import random
import zlib
from collections.abc import Callable

from fgrpo_jax.answers import ACTIONS
from fgrpo_jax.structs import Problem

HELD_OUT = 8  # of the four mazes of 5 x 5 one is
DETOURS = 3  # so many and more share a kind; each makes a path four actions longer
WORDS = {letter: word for word, letter in ACTIONS.items()}


def generate(count: int, split: str, size: int, seed: int = 0) -> list[Problem]:
    """`count` mazes.

    The text holds a letter a square, `#` wall, `.` path, `s` start and `g` goal, and a line break
    a row, between the words of the sequence's other tokens. The answer is the path, a letter an
    action; the worked solution its words, and DONE. The kind is the path's number of actions.

    Args:
        split: "train" or "test".
        size: squares a side, odd, from 5.
    """
    return [_problem(size, split, f"{size}/{seed}/{split}/{i}") for i in range(count)]


def _problem(size: int, split: str, key: str) -> Problem:
    draw = random.Random(key)  # a string seeds by its SHA-512, alike on every platform
    while True:
        grid, path = _draw(size, draw.random)
        text = f"GRID_START {grid.decode()}GRID_END PATH_START"
        if (zlib.crc32(text.encode()) % HELD_OUT == 0) == (split == "test"):
            break
    most = 2 * (size - 3) + 4 * DETOURS  # the first is the distance without walls
    kind = f"{most}+" if len(path) >= most else str(len(path))
    return Problem(text, path, kind, " ".join([*(WORDS[letter] for letter in path), "DONE"]))


@functools.cache
def _board(size: int) -> tuple[bytes, list[list[int]]]:
    """(Walls alone, with line breaks; the neighbours of each cell), cells by their place."""
    walls = (b"#" * size + b"\n") * size
    near: list[list[int]] = [[] for _ in walls]
    cells = [row * (size + 1) + column for row in range(1, size, 2) for column in range(1, size, 2)]
    for cell in cells:
        for step in (-2 * (size + 1), 2 * (size + 1), -2, 2):
            if cell + step in cells:
                near[cell].append(cell + step)
    return walls, near


def _draw(size: int, uniform: Callable[[], float]) -> tuple[bytearray, str]:
    """(The rows of a random maze, the letters of its path)."""
    walls, near = _board(size)
    grid = bytearray(walls)
    ways: list[list[int] | None] = [None] * len(grid)  # open neighbours of a cell at the edge
    before = [0] * len(grid)  # the cell from which each was opened
    edge: list[int] = []
    cell = start = size + 2
    while True:
        grid[cell] = 46  # "."
        for other in near[cell]:
            if grid[other] == 35:  # "#"
                if (open_ones := ways[other]) is None:
                    ways[other] = [cell]
                    edge.append(other)
                else:
                    open_ones.append(cell)
        if not edge:
            break
        place = int(uniform() * len(edge))
        cell, edge[place] = edge[place], edge[-1]
        edge.pop()
        open_ones = ways[cell]
        assert open_ones
        one = open_ones[int(uniform() * len(open_ones)) if len(open_ones) > 1 else 0]
        before[cell] = one
        grid[(cell + one) >> 1] = 46  # the square between
    cell = goal = (size - 2) * (size + 2)
    actions = {-2 * (size + 1): "UU", 2 * (size + 1): "DD", -2: "LL", 2: "RR"}
    path = []
    while cell != start:
        one = before[cell]
        path.append(actions[cell - one])
        cell = one
    grid[start], grid[goal] = b"sg"
    return grid, "".join(reversed(path))
