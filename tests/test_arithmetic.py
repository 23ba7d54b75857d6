import re

import pytest

from fgrpo_jax import UserError, arithmetic
from fgrpo_jax.answers import boxed_answer


def test_worked_solutions_are_true():
    for problem in arithmetic.generate(2000, "train"):
        line, box = problem.worked.split("\n")
        values = {eval(part) for part in line.split("=")}
        assert values == {int(problem.answer)} and boxed_answer(box) == problem.answer
        assert line.startswith(problem.text + "=")


def test_kinds_say_digits_and_operations():
    for problem in arithmetic.generate(500, "test"):
        sizes = re.findall(r"\d", problem.kind)
        terms = re.findall(r"\d+", problem.text)
        assert re.sub(r"\d", "", problem.kind) == re.sub(r"\d", "", problem.text)
        assert all(len(t) == int(s) for t, s in zip(terms, sizes, strict=True))


def test_held_out_problems_are_never_trained_on():
    train, test = ({p.text for p in arithmetic.generate(8000, s)} for s in ("train", "test"))
    assert len(train) > 1000 and len(test) > 200 and not train & test


def test_tables_are_held_out_of_the_test_split():
    assert not {p.kind for p in arithmetic.generate(99, "test")} & set(arithmetic.TABLES)
    asked = arithmetic.generate(99, "test", "1+1")
    assert {p.kind for p in asked} == {"1+1"} and len({p.text for p in asked}) > 30


def test_slips_are_in_the_worked_solution_alone_and_grow_with_its_length():
    for kind, chance in (("3+3", 0.4), ("2+2", 0.2), ("1+1", 0.0)):
        clean, slipped = (
            arithmetic.generate(2000, "train", kind, slips=slips) for slips in (0.0, 0.4)
        )
        differ = [a.worked != b.worked for a, b in zip(clean, slipped, strict=True)]
        assert [p.answer for p in clean] == [p.answer for p in slipped]
        # one digit in ten is put in place of itself; four standard errors are 0.044
        assert abs(sum(differ) / 2000 - 0.9 * chance) < 0.045


def test_pure_in_its_arguments():
    assert arithmetic.generate(50, "train") == arithmetic.generate(60, "train")[:50]
    assert arithmetic.generate(50, "train") != arithmetic.generate(50, "train", seed=1)


def test_the_product_is_taken_first():
    (problem,) = arithmetic.generate(1, "train", "1-1*1")
    a, b, c = map(int, re.findall(r"\d+", problem.text))
    assert problem.answer == str(a - b * c)


@pytest.mark.parametrize("kinds", ["5+1", "1", "1/1", "1+1+1+1", "1+1,"])
def test_unknown_kinds(kinds):
    with pytest.raises(UserError, match="is no kind of arithmetic"):
        arithmetic.generate(1, "train", kinds)
