import pytest

from fgrpo_jax import UserError, forms
from fgrpo_jax.forms import Part


@pytest.mark.parametrize(
    "source, parts",
    [
        ("arithmetic", [Part("arithmetic", "", None)]),
        ("arithmetic:2+3,1*1-2", [Part("arithmetic", "2+3,1*1-2", None)]),
        (
            "arithmetic:2*1+1+jsonl:a+b.jsonl+arithmetic",
            [
                Part("arithmetic", "2*1+1", None),
                Part("jsonl", "a+b.jsonl", None),
                Part("arithmetic", "", None),
            ],
        ),
        (
            "0.7*jsonl:a.jsonl+3e-1*parquet:b.parquet",
            [Part("jsonl", "a.jsonl", 0.7), Part("parquet", "b.parquet", 0.3)],
        ),
        (
            "2*maze:17x500+1*maze:9",
            [Part("maze", "17x500", 2.0), Part("maze", "9", 1.0)],
        ),
        (
            "tfds:gsm8k:main/train+hf:o/gsm8k:main/train[:9]+reasoning_gym:sudoku",
            [
                Part("tfds", "gsm8k:main/train", None),
                Part("hf", "o/gsm8k:main/train[:9]", None),
                Part("reasoning_gym", "sudoku", None),
            ],
        ),
    ],
)
def test_sources_are_taken_apart(source, parts):
    assert forms.parts(source) == parts


@pytest.mark.parametrize(
    "source, message",
    [
        ("", "x is '': it must be arithmetic"),
        ("csv:a", "x is 'csv:a': it must be arithmetic"),
        ("jsonl:", "x is 'jsonl:': it must be"),
        ("arithmetics", "it must be arithmetic"),
        ("hf:name", "x is 'hf:name': it must be"),
        ("tfds:name/", "x is 'tfds:name/': it must be"),
        ("0*jsonl:a", "x has the weight '0': it must be a number above 0"),
        ("-1*jsonl:a", "the weight '-1'"),
        ("nan*jsonl:a", "the weight 'nan'"),
        ("two*jsonl:a", "the weight 'two'"),
        ("1*jsonl:a+jsonl:b", "give each of its sources a weight, or none"),
        ("jsonl:a+0*jsonl:b", "the weight '0'"),
        *(
            (f"maze:{rest}", f"x is 'maze:{rest}': write maze:SIZE or maze:SIZExCOUNT")
            for rest in ("16", "3", "101", "17x0", "17x", "x9", "17x-1", "a")
        ),
        ("maze", "x is 'maze': it must be"),
    ],
)
def test_bad_sources_get_one_sentence(source, message):
    with pytest.raises(UserError) as error:
        forms.parts(source, "x")
    assert message in str(error.value) and "\n" not in str(error.value)


def test_mapping():
    assert forms.mapping("") == {}
    assert forms.mapping("problem=q | question, answer=a.b") == {
        "problem": ["q", "question"],
        "answer": ["a.b"],
    }


@pytest.mark.parametrize(
    "text", ["problem", "question=problem", "problem=", "problem=a|", "answer=a,answer=b", ","]
)
def test_bad_mappings_get_one_sentence(text):
    with pytest.raises(UserError, match=r"data.fields has .*: write FIELD=NAME once a field"):
        forms.mapping(text)


def test_steps():
    assert forms.steps("") == [] and forms.steps("3") == [range(3, 4)]
    assert forms.steps("3-5, 7") == [range(3, 6), range(7, 8)]
    for text in ("5-3", "0", "-1", "3;4", "1-2-3", "3-"):
        with pytest.raises(UserError, match="profile.steps is .*: write steps"):
            forms.steps(text)
