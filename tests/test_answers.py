import pytest

from fgrpo_jax.answers import (
    boxed_answer,
    chosen_letter,
    last_number,
    normalise,
    path,
    plain_number,
    quick_verdict,
    reaches,
    stated_answer,
)


@pytest.mark.parametrize(
    "response, answer",
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{5} is wrong; \boxed{7}", "7"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{5} and then \boxed{7", None),
        (r"\boxed{5} and then \boxed{}", None),
        ("42", None),
        ("", None),
        (r"<think>\boxed{5}", None),
        (r"<think>\boxed{5}</think> \boxed{6}", "6"),
        (r"<think>\boxed{5}</think> none", None),
        (r"prompt opened it \boxed{5}</think>\boxed{8}", "8"),
    ],
)
def test_boxed_answer(response, answer):
    assert boxed_answer(response) == answer


@pytest.mark.parametrize(
    "gold, answer, verdict",
    [
        ("3", "3", True),
        ("3", " 3 ", True),
        ("3", "4", False),
        ("-3", "3", False),
        ("18", "18.00", True),
        ("18", "$18.00", True),
        ("70000", "70,000", True),
        ("10,\\!080", "10080", True),
        ("14{,}916", "14916", True),
        ("1234", "1,23,4", None),
        ("10", "1e1", True),
        ("6.02e23", r"6.02\times 10^{23}", True),
        ("1.6e-19", r"1.6 \cdot 10^{-19}", True),
        ("1e3", r"1 \times 10^4", False),
        ("0.25", r"\frac{1}{3}", None),
        (".5", "0.50", True),
        ("16", "016", True),
        ("0.0000001", "0.0000002", False),
        ("1/2", r"\frac{1}{2}", True),
        ("1/3", r"\dfrac{2}{6}", True),
        ("1/3", "0.333", None),  # how much rounding to forgive is not for text to say
        ("1/12", "1/13", False),
        ("2", "2 2/3", False),
        ("5/4", "1 1/4", True),
        ("10", "4 10/3", None),
        ("-3/2", "-1 1/2", True),
        ("12", r"12^{\text{th}}", True),
        ("[2,5)", "[2, 5)", True),
        ("(0,9)", "[0,9)", None),
        (r"\text{east}", "East", True),
        ("x", "X", None),
        ("Evelyn", "Angela", None),
        ("", "", False),
        ("x", "y", None),
        ("56", "5 6", None),
        ("x y", "xy", None),
        ("11/2", "1 1/2", False),
        ("23", "２３", None),
        ("$5$", " 5 ", True),
    ],
)
def test_quick_verdict(gold, answer, verdict):
    assert quick_verdict(gold, answer) is verdict


@pytest.mark.parametrize(
    "response, answer",
    [
        ("6 + 7 = 13", "13"),
        ("13.", "13"),
        ("it is -3, no: -4", "-4"),
        ("about 1,234.50 dollars", "1234.50"),
        ("none", None),
        ("4,5", "5"),
        ("12,345,678", "12345678"),
        ("", None),
    ],
)
def test_last_number(response, answer):
    assert last_number(response) == answer


@pytest.mark.parametrize(
    "response, answer",
    [
        ("2+40=42\n#### 42\nand so on", "42"),
        ("#### 1\n#### -3", "-3"),
        ("He made $70,000.\n#### 70,000", "70,000"),
        ("#### $18.00", "18.00"),
        (r"so \boxed{7}. #### 8", "7"),
        (r"#### 8 and \boxed{7", None),
        ("The answer is 12.", "12"),
        ("the answer is: **12.5**.", "12.5"),
        ("Final Answer: **73**", "73"),
        ("Answer: $13$", "13"),
        ("<think>#### 5", None),
        ("<think>#### 5</think>#### 6", "6"),
        ("I have no idea", None),
        ("####", None),
    ],
)
def test_stated_answer(response, answer):
    assert stated_answer(response) == answer


@pytest.mark.parametrize(
    "response, letter",
    [
        (r"\boxed{C}", "C"),
        (r"\boxed{\text{(b)}}", "B"),
        ("The answer is (D).", "D"),
        ("the answer is A) because", "A"),
        ("B", "B"),
        (" (c) ", "C"),
        (r"\boxed{CD}", None),
        ("Answer: both", None),
        ("I like A", None),
    ],
)
def test_chosen_letter(response, letter):
    assert chosen_letter(response) == letter


@pytest.mark.parametrize(
    "text, plain",
    [
        (r"\left( 1 ,\; 2 \right)", "( 1 , 2 )"),
        (r"\tfrac 3 4", r"\frac{3}{4}"),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
        (r"864 \mbox{ inches}^2", "864 inches^2"),
        ("1,000,000", "1000000"),
        ("1,00", "1,00"),
        ("f(1,234,567)", "f(1234567)"),
        ("3.", "3"),
    ],
)
def test_normalise(text, plain):
    assert normalise(text) == plain


def test_plain_number():
    assert plain_number("-1.5e2") == -150 and plain_number(r"\frac{3}{6}") * 2 == 1
    for text in ("", "1/0", "1..2", "x", "1 2", "4 10/3", "1e9999", "9" * 101):
        assert plain_number(text) is None


@pytest.mark.parametrize(
    "response, letters",
    [
        ("UP DOWN LEFT RIGHT DONE", "UDLR"),
        ("UP DONE DOWN DONE", "U"),
        ("UP DOWN", None),  # cut off, or ended by <eos>
        ("UP PATH DOWN DONE", None),
        ("UP <eos> DONE", None),
        ("UPDOWN DONE", None),
        ("DONE", ""),
        ("", None),
    ],
)
def test_path(response, letters):
    assert path(response) == letters


@pytest.mark.parametrize(
    "letters, right",
    [
        ("RRDD", True),
        ("RLRRDD", True),  # back and forth
        ("RRDDUUU", True),  # the episode has ended at the goal
        ("RRD", False),
        ("DRRDD", False),  # into a wall
        ("RRDR", False),
        ("UUUUUU", False),
        ("", False),
    ],
)
def test_reaches(letters, right):
    text = "GRID_START #####\n#s..#\n###.#\n###g#\n#####\nGRID_END PATH_START"
    assert reaches(text, letters) == right


def test_nothing_is_reached_in_a_text_that_is_no_maze():
    for text in ("", "what is 2 + 3?", "\n\n", "s"):
        assert not reaches(text, "UDLR" * 50)
