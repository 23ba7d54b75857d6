import pytest

from fgrpo_jax import UserError, fields


def one(row, mapping=""):
    (problem,) = fields.problems([row], "file f", "stem", mapping)
    return problem


def user(text, **more):
    return {"prompt": [{"role": "user", "content": text}], **more}


@pytest.mark.parametrize(
    "row, text, answer, kind, worked",
    [
        ({"problem": "p", "answer": "a"}, "p", "a", "stem", ""),
        ({"Question": "p", "Answer": 3}, "p", "3", "stem", ""),
        ({"question": "p", "answer": 27.0, "level": 2}, "p", "27", "level 2", ""),
        ({"question": "p", "answer": 0.25, "subject": "S", "level": "L"}, "p", "0.25", "L", ""),
        ({"question": "p", "answer": None}, "p", "", "stem", ""),
        ({"question": "p", "answer": float("nan")}, "p", "", "stem", ""),
        ({"problem": "p", "answer": "2\n#### $-1,234 "}, "p", "-1234", "stem", "2\n#### $-1,234 "),
        ({"problem": "p", "answer": "#### 5"}, "p", "5", "stem", "#### 5"),
        ({"problem": "p", "answer": "item #### 5"}, "p", "item #### 5", "stem", ""),
        ({"problem": "p", "solution": r"so \boxed{\frac{1}{2}}."}, "p", r"\frac{1}{2}", "stem",
         r"so \boxed{\frac{1}{2}}."),
        ({"problem": "p", "solution": "a proof"}, "p", "", "stem", "a proof"),
        ({"problem": "p", "answer": " ", "solution": r"\boxed{4}"}, "p", "4", "stem", r"\boxed{4}"),
        ({"problem": "p", "answer": r"$\boxed{4}$"}, "p", "4", "stem", ""),
        ({"question": "p", "final_answer": ["1", 2.0], "solution": ["a", "b"]}, "p", "1, 2", "stem",
         "a"),
        ({"Body": "I had 2", "Question": "q", "Answer": 1.0}, "I had 2. q", "1", "stem", ""),
        ({"context": "C", "question": "q", "answer": "1"}, "C q", "1", "stem", ""),
        ({"context": None, "question": "q", "answer": "1"}, "q", "1", "stem", ""),
        (user("p", reward_model={"ground_truth": "7"}, data_source="d"), "p", "7", "d", ""),
        (user("p", reward_model={"ground_truth": {"target": "7", "solution": "s"}}), "p", "7",
         "stem", "s"),
    ],
)  # fmt: skip
def test_guesses(row, text, answer, kind, worked):
    problem = one(row)
    assert (problem.text, problem.answer, problem.kind) == (text, answer, kind)
    assert problem.worked == worked and problem.data is None


@pytest.mark.parametrize(
    "given, kept",
    [
        (r"What is 1? Let's think step by step and output the final answer within \boxed{}.",
         "What is 1?"),
        ("Find $x$.\nPlease reason step by step, and put your final answer within \\boxed{}.\n",
         "Find $x$."),
        (r"Let's see how \boxed{3} was put.", r"Let's see how \boxed{3} was put."),
        (r"Put 1 in \boxed{}. Why?", r"Put 1 in \boxed{}. Why?"),
        ("  as it is\n", "  as it is\n"),
    ],
)  # fmt: skip
def test_an_instruction_at_the_end_of_chat_messages_is_cut_off(given, kept):
    assert one(user(given, answer="1")).text == kept
    assert one({"prompt": given, "answer": "1"}).text == given


@pytest.mark.parametrize(
    "gold, box, repaired",
    [
        (r"\begin{pmatrix}1\-2\end{pmatrix}", r"\begin{pmatrix} 1 \\ -2 \end{pmatrix}",
         r"\begin{pmatrix} 1 \\ -2 \end{pmatrix}"),
        (r"\begin{pmatrix}1&2\end{pmatrix}", r"\begin{pmatrix} 1 & 2 \end{pmatrix}",
         r"\begin{pmatrix}1&2\end{pmatrix}"),
        ("19{}43", r"19 \text{ and }43", r"19 \text{ and }43"),
        ("144^3", r"144 \mbox{ m}^3", "144"),
        ("144", r"144 \mbox{ m}^3", "144"),
        (r"144 \mbox{ m}^3", r"144 \mbox{ m}^3", r"144 \mbox{ m}^3"),
        ("x^3", "x^3", "x^3"),
        (r"10^3", r"10^3\text{ m}", "10^3"),
        ("90{square", r"90\text{ square units}", r"90\text{ square units}"),
        ("20", r"20\text{ days}", "20"),
        ("5", "6", "5"),
        ("{}", "", "{}"),
    ],
)  # fmt: skip
def test_damaged_golds_are_taken_from_the_solution_s_box(gold, box, repaired):
    worked = rf"so $\boxed{{{box}}}$." if box else "so"
    assert one({"problem": "p", "answer": gold, "solution": worked}).answer == repaired


def test_a_mapping_names_fields_nested_ones_and_alternatives():
    row = {"q": "p", "question": "no", "a": {"b": 3}, "s": "w", "k": "kind", "d": {"x": [1]}}
    problem = one(row, "problem=nothing|q,answer=a.b,kind=k,worked=s,data=d")
    assert (problem.text, problem.answer, problem.kind) == ("p", "3", "kind")
    assert problem.worked == "w" and problem.data == {"x": [1]}
    assert one({"question": "p", "target": 1, "answer": 2}, "answer=target").answer == "1"


def test_a_mapping_to_a_short_solution_holds():
    assert one({"problem": "p", "solution": "5"}, "answer=solution,worked=problem").answer == "5"


@pytest.mark.parametrize(
    "row, mapping, message",
    [
        ({"foo": "p", "answer": "1"}, "", "file f has no field that is known to hold the problem; "
         "its fields are foo, answer: say which in data.fields, as problem=FIELD,answer=FIELD"),
        ({"problem": "p", "x": {"y": 1}}, "", "to hold the answer; its fields are problem, x.y: s"),
        ({}, "", "its fields are none"),
        ({"problem": "p", "answer": "1"}, "answer=gold|g", "data.fields says answer=gold|g, which "
         "file f does not have: its fields are problem, answer"),
        ({"problem": "", "answer": "1"}, "", "file f, row 1: its problem must be a text that is n"),
        ({"problem": "\ud800", "answer": "1"}, "", "file f, row 1: 'utf-8' codec can't encode"),
        ({"problem": "p", "g": {"a": 1}}, "answer=g", "its answer is an object: name a field"),
        ({"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
          "answer": "1"}, "", "chat messages of which the last is the user's one"),
        ({"prompt": ["a"], "answer": "1"}, "", "chat messages of which the last is the user's one"),
        ({"text": "p", "answer": "1", "kind": "k", "worked": "", "data": "{"}, "", "must hold J"),
    ],
)  # fmt: skip
def test_what_cannot_be_guessed_gets_one_sentence(row, mapping, message):
    with pytest.raises(UserError) as error:
        one(row, mapping)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_the_first_row_decides():
    rows = [{"problem": "p", "answer": "1"}, {"problem": "p", "solution": r"\boxed{2}"}]
    with pytest.raises(UserError, match="file f, row 2 lacks the field 'answer', which row 1 has"):
        list(fields.problems(rows, "file f", "stem"))


def test_a_row_may_lack_what_is_not_needed():
    rows = [
        {"problem": "p", "answer": "1", "kind": "k", "worked": "w"},
        {"problem": "q", "answer": 2},
    ]
    _, second = fields.problems(rows, "file f", "stem")
    assert (second.text, second.answer, second.kind, second.worked) == ("q", "2", "stem", "")
