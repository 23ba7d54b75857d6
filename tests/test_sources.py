import json
import sys
import types

import pyarrow
import pytest
from pyarrow import parquet

from fgrpo_jax import UserError, maze, rlvr_dataset, sources, weights
from fgrpo_jax.structs import Problem

# file: rows, first gold, last gold, rows without a gold
REAL = {
    "jsonl:gsm8k_train.jsonl": (7473, "72", "50", 0),
    "jsonl:gsm8k_test.jsonl": (1319, "18", "14", 0),
    "jsonl:math500.jsonl": (500, r"\left( 3, \frac{\pi}{2} \right)", r"106^\circ", 0),
    "jsonl:aime24.jsonl": (30, "204", "902", 0),
    "parquet:aime25.parquet": (30, "70", "240", 0),
    "jsonl:amc23.jsonl": (40, "27", "8", 0),
    "jsonl:minerva_math.jsonl": (272, "1.6", "10.1", 0),
    "jsonl:olympiadbench.jsonl": (675, "2", "11", 0),
    "jsonl:svamp.jsonl": (1000, "145", "91", 0),
    "parquet:math_train.parquet": (7500, "0", r"(\frac{8}{5},-\frac{35}{2})", 2),
    "parquet:math_test.parquet": (5000, "2", None, 0),
}


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"jsonl:{path}"


@pytest.mark.parametrize("name", REAL)
def test_real_files_load_with_no_mapping(shared_folder, name):
    kind, _, file = name.partition(":")
    problems = sources.read(f"{kind}:{shared_folder / 'data' / file}", "train")
    rows, first, last, empty = REAL[name]
    assert len(problems) == rows
    for problem, gold in ((problems[0], first), (problems[-1], last)):
        assert gold is None or problem.answer == gold
    assert sum(not problem.answer for problem in problems) == empty
    assert all(problem.text.strip() and problem.kind for problem in problems)
    assert not any("####" in p.answer or r"\boxed" in p.answer for p in problems)


@pytest.mark.parametrize("name, matrices", [("math_train", 100), ("math_test", 72)])
def test_math_s_matrices_keep_their_rows(shared_folder, name, matrices):
    problems = sources.read(f"parquet:{shared_folder / 'data' / name}.parquet", "train")
    found = [p.answer for p in problems if r"\begin" in p.answer]
    assert len(found) == matrices and all(r"\\" in answer for answer in found)


def test_gsm8k_keeps_its_solution(shared_folder):
    problems = sources.read(f"jsonl:{shared_folder / 'data' / 'gsm8k_test.jsonl'}", "test")
    assert problems[0].worked.endswith("#### 18") and problems[0].kind == "gsm8k_test"
    assert all(float(problem.answer) == int(problem.answer) for problem in problems)


@pytest.mark.parametrize(
    "content, message",
    [
        ("", "has no problem: it is empty"),
        ('{"problem": "1", "answer": "1"}\n\n{"problem": "2"}\n', "row 2 lacks the field 'answer'"),
        ('{"problem": "1", "answer": "1"}\n\n[1]\n', "line 3: not a JSON object"),
        ("nonsense\n", "line 1: not a JSON object"),
        ("[" * 100_000 + "\n", "line 1: not a JSON object"),
        ('{"problem": "\xff"}', "line 1: not a JSON object .'utf-8' codec"),
    ],
)
def test_bad_jsonl(tmp_path, content, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError, match=message):
        sources.read(f"jsonl:{path}", "train")


def test_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"problem": ["1", "2"], "answer": [1.5, None]}), path)
    problems = sources.read(f"parquet:{path}", "train")
    assert problems == [Problem("1", "1.5", "a"), Problem("2", "", "a")]
    path.write_bytes(b"PAR1 and so on")
    with pytest.raises(UserError, match="a.parquet cannot be read"):
        sources.read(f"parquet:{path}", "train")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_no_file(kind, tmp_path):
    with pytest.raises(UserError, match="data file /nowhere.x does not exist"):
        sources.read(f"{kind}:/nowhere.x", "train")
    with pytest.raises(UserError, match="cannot be read"):
        sources.read(f"{kind}:{tmp_path}", "train")


def test_joined_sources_follow_each_other(tmp_path):
    a = jsonl(tmp_path / "a.jsonl", [{"problem": "1", "answer": 1}])
    b = jsonl(tmp_path / "b.jsonl", [{"question": "2", "target": 2}])
    assert [(p.text, p.kind) for p in sources.read(f"{a}+{b}", "train")] == [("1", "a"), ("2", "b")]


def test_arithmetic_is_as_ever():
    assert len(sources.read("arithmetic:2+3", "train")) == sources.ARITHMETIC
    assert sources.read("arithmetic", "test")[0].worked


def test_mazes_are_counted_by_default_or_as_asked():
    assert len(sources.read("maze:5", "train")) == sources.MAZES["train"] == 65_536
    assert len(sources.read("maze:5", "test")) == sources.MAZES["test"] == 1024
    for split in ("train", "test"):
        assert sources.read("maze:9x7", split) == maze.generate(7, split, 9)


def test_what_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(UserError, match="needs a package: pip install tensorflow-datasets"):
        sources.read("tfds:gsm8k/train", "train")
    with pytest.raises(UserError, match="needs the package datasets: pip install datasets"):
        sources.read("hf:openai/gsm8k/test", "train")
    with pytest.raises(UserError, match=r"needs the extra tasks: pip install 'fgrpo_jax\[tasks\]'"):
        sources.read("reasoning_gym:sudoku", "train")


def test_hf(monkeypatch):
    def load_dataset(name, config, split):
        if split == "none":
            raise ValueError('Unknown split "none".\nThere are others.')
        return [{"question": f"{name} {config} {split}", "answer": "#### 3"}]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    (problem,) = sources.read("hf:openai/gsm8k:main/test", "train")
    assert problem == Problem("openai/gsm8k main test", "3", "openai/gsm8k:main", "#### 3")
    (problem,) = sources.read("hf:gsm8k/test", "train")
    assert problem.text == "gsm8k None test"
    with pytest.raises(UserError, match='hf:gsm8k/none cannot be read: Unknown split "none".$'):
        sources.read("hf:gsm8k/none", "train")


def reasoning_gym(monkeypatch):
    def create_dataset(name, size, seed):
        if name == "none":
            raise ValueError("Dataset 'none' not registered")
        return [
            {"question": f"{i}?", "answer": None if i % 2 else str(i), "metadata": {"at": i}}
            for i in range(seed, seed + size)  # as it does
        ]

    module = types.SimpleNamespace(create_dataset=create_dataset)
    monkeypatch.setitem(sys.modules, "reasoning_gym", module)


def test_reasoning_gym_keeps_the_entry(monkeypatch):
    reasoning_gym(monkeypatch)
    train, test = (sources.read("reasoning_gym:sudoku", split) for split in ("train", "test"))
    assert train[1] == Problem(
        "1?", "", "sudoku", "", {"question": "1?", "answer": None, "metadata": {"at": 1}}
    )
    assert not {p.text for p in train} & {p.text for p in test}
    with pytest.raises(UserError, match="reasoning_gym:none cannot be drawn: Dataset 'none' not"):
        sources.read("reasoning_gym:none", "train")


def test_real_reasoning_gym():
    pytest.importorskip("reasoning_gym")
    problems = sources.read("reasoning_gym:leg_counting", "test")
    assert len(problems) == sources.TASK["test"] and problems[0].data["metadata"]


def test_a_dataset_is_written_once_and_reads_back(tmp_path, monkeypatch, capsys):
    reasoning_gym(monkeypatch)
    a = jsonl(
        tmp_path / "a.jsonl",
        [{"q": f"é {i}\n", "answer": f"w\n#### {i}", "level": i} for i in range(300)],
    )
    source = f"{a}+reasoning_gym:sudoku"
    arguments = [source, "--test", "arithmetic:2+3", "--name", "mine", "--out", str(tmp_path)]
    mapping = "problem=q"
    assert rlvr_dataset.main([*arguments, "--fields", mapping]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["rows"] == {"train": 300 + 2048, "test": sources.ARITHMETIC}
    assert printed["sources"]["train"] == f"tfds:{tmp_path}/mine/1.0.0/train"
    again = sources.read(printed["sources"]["train"], "")
    assert again == sources.read(source, "train", mapping=mapping)
    assert sources.read(printed["sources"]["test"], "") == sources.read("arithmetic:2+3", "test")
    assert "tensorflow" not in sys.modules

    assert rlvr_dataset.main(["arithmetic", *arguments[1:]]) == 2
    assert "mine exists: remove it" in capsys.readouterr().err
    for source, message in (
        (f"{printed['sources']['train']}s", "cannot be read"),
        (f"tfds:{tmp_path}/train", "has no dataset_info.json"),
    ):
        with pytest.raises(UserError, match=message):
            sources.read(source, "train")


@pytest.mark.parametrize(
    "source, name, message",
    [
        ("1*arithmetic", "a", "weights are a run's business"),
        ("arithmetic", "A b", "--name is 'A b': it must be lower-case letters"),
        ("jsonl:/nowhere", "a", "does not exist"),
        ("csv", "a", "it must be arithmetic"),
    ],
)
def test_mistakes_of_writing(tmp_path, capsys, source, name, message):
    assert rlvr_dataset.main([source, "--name", name, "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


def test_data_that_is_no_json_is_told_before_anything_is_written(tmp_path):
    with pytest.raises(UserError, match="the data of 'p' is not JSON"):
        rlvr_dataset.write({"train": [Problem("p", "1", data=object())]}, "a", tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_clean_dataset_is_what_a_run_would_keep(tmp_path, capsys):
    """By hand: both copies of 1+1 go, since they disagree; one of 2+2's; 4+4 has no gold that can
    be judged; the last prompt is longer than 12 tokens."""
    rows = [
        ("1+1", "2"),
        ("2+2", "4"),
        ("1+1", "3"),
        ("2+2", "4"),
        ("3+3", "6"),
        ("4+4", "\\frac{"),
    ]
    rows.append(("1+2+3+4+5+6+7", "28"))
    source = jsonl(tmp_path / "a.jsonl", [{"problem": p, "answer": a} for p, a in rows])
    arguments = [source, "--name", "mine", "--out", str(tmp_path), "--clean"]
    tiny = str(weights.EMBEDDED / "tiny_arithmetic")
    assert rlvr_dataset.main([*arguments, "--tokenizer", tiny, "--max_prompt", "12"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["rows"] == {"train": 2}
    assert {k: v for k, v in printed["dropped"]["train"].items() if v} == {
        "contradicting duplicate": 2, "duplicate": 1, "unparsable gold": 1, "too long": 1,
    }  # fmt: skip
    again = sources.read(printed["sources"]["train"], "")
    assert [(p.text, p.answer) for p in again] == [("2+2", "4"), ("3+3", "6")]

    arguments[2] = "whole"
    assert rlvr_dataset.main(arguments) == 0  # without a tokenizer none is too long
    assert json.loads(capsys.readouterr().out)["rows"] == {"train": 3}
    assert rlvr_dataset.main([*arguments[:-1], "--tokenizer", tiny]) == 2
    assert "give --clean too" in capsys.readouterr().err
