import collections
import time
from statistics import mean, median

import pytest

from fgrpo_jax import answers, maze
from fgrpo_jax.answers import ACTIONS, reaches

STEPS = {"UP": (-1, 0), "DOWN": (1, 0), "LEFT": (0, -1), "RIGHT": (0, 1)}  # in the paper's order


def rows(problem):
    first, *grid, end, start = problem.text.split()
    assert (first, end, start) == ("GRID_START", "GRID_END", "PATH_START")
    assert problem.text == f"GRID_START {''.join(row + chr(10) for row in grid)}GRID_END PATH_START"
    return grid


def breadth_first(grid):
    """The words of the first shortest path that a plain search of the squares finds."""
    start, goal = (1, 1), (len(grid) - 2, len(grid) - 2)
    found, queue = {start: []}, collections.deque([start])
    while queue:
        at = queue.popleft()
        for word, (down, right) in STEPS.items():
            r, c = at[0] + down, at[1] + right
            if grid[r][c] != "#" and (r, c) not in found:
                found[r, c] = [*found[at], word]
                queue.append((r, c))
    return found[goal], len(found)


@pytest.mark.parametrize("size", [5, 7, 11, 17])
def test_mazes_are_perfect_and_their_target_is_the_path(size):
    cells = ((size - 1) // 2) ** 2
    for problem in maze.generate(60, "train", size):
        grid = rows(problem)
        assert len(grid) == size and {len(row) for row in grid} == {size}
        assert grid[1][1] == "s" and grid[-2][-2] == "g"
        flat = "".join(grid)
        assert flat.count("s") == flat.count("g") == 1 and set(flat) <= set("#.sg")
        assert set(grid[0] + grid[-1] + "".join(row[0] + row[-1] for row in grid)) == {"#"}
        # a tree of the cells has an edge less than cells, and all of it is reached
        path, reached = breadth_first(grid)
        assert reached == len(flat) - flat.count("#") == 2 * cells - 1
        assert problem.worked == " ".join([*path, "DONE"])
        assert problem.answer == "".join(word[0] for word in path)


def test_path_lengths_of_the_paper():
    """At least 28 actions (14 cells apart), 28 to the median maze and 29.1 on the mean."""
    lengths = [len(problem.answer) for problem in maze.generate(3000, "train", 17)]
    assert min(lengths) == median(lengths) == 28
    assert abs(mean(lengths) - 29.1) < 0.2  # whose standard error is 0.04
    assert sorted(lengths)[2850] == 32 and 36 <= max(lengths) <= 48


def test_kinds_are_few():
    kinds = collections.Counter(problem.kind for problem in maze.generate(2000, "train", 17))
    assert set(kinds) == {"28", "32", "36", "40+"} and kinds["28"] > 1000
    for problem in maze.generate(300, "test", 11):
        assert problem.kind == {16: "16", 20: "20", 24: "24"}.get(len(problem.answer), "28+")


def test_held_out_mazes_are_never_trained_on():
    for size in (5, 7, 9):
        train, test = (
            {p.text for p in maze.generate(n, split, size)}
            for n, split in ((4000, "train"), (400, "test"))
        )
        assert train and test and not train & test
        trees = {5: 4, 7: 192, 9: 100_352}[size]  # that span the cells, by Kirchhoff's theorem
        assert len(train | test) <= trees and (size > 5 or len(train) + len(test) == 4)


def test_pure_in_its_arguments():
    assert maze.generate(20, "train", 9) == maze.generate(30, "train", 9)[:20]
    assert maze.generate(20, "train", 9) != maze.generate(20, "train", 9, seed=1)
    assert len({p.text for p in maze.generate(500, "train", 17)}) == 500


def test_speed():
    """At least 5,000 mazes of 17 x 17 a second and core, their texts and targets included."""
    began = time.process_time()
    maze.generate(2000, "train", 17)
    rate = 2000 / (time.process_time() - began)
    print(f"{rate:.0f} mazes a second")
    assert rate > 5000


def test_targets_reach_the_goal():
    for problem in maze.generate(50, "test", 17):
        path = answers.path(problem.worked)
        assert path == problem.answer and set(path) <= set(ACTIONS.values())
        assert reaches(problem.text, path) and not reaches(problem.text, path[:-1])
