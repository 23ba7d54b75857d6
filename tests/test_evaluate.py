"""The command: the embedded policy on files that look like benchmarks', and others' responses."""

import itertools
import json
import os
import pathlib
import re

import numpy as np
import pytest
from pyarrow import parquet

from fgrpo_jax import benchmarks, evaluate, held_out, rlvr_dataset, tokenizer, weights

CONFIG = str(pathlib.Path(__file__).parents[1] / "configs/tiny_arithmetic_focal.py")
SUMS = [("2+5", "7"), ("12+30", "42"), ("9-4", "5"), ("3+3", "6"), ("8+1", "9")]
N = 6


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    lines = [json.dumps({"problem": text, "answer": gold}) for text, gold in SUMS]
    (folder / "math500.jsonl").write_text("\n".join(lines))
    (folder / "gsm8k_test.jsonl").write_text("\n".join(lines[:2]))
    return folder


def run(data, workdir, *flags):
    argv = ["--config", CONFIG, "--data-dir", str(data), "--workdir", str(workdir), *flags]
    return evaluate.main(argv)


def sampled(data, workdir, *flags):
    return run(data, workdir, "--samples", str(N), "--system", "", *flags)


@pytest.fixture(scope="module")
def done(data, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("run")
    assert sampled(data, workdir, "--benchmarks", "math500,gsm8k", "--k", "3,5") == 0
    return workdir


def test_pass_at_k_is_that_of_all_choices(done):
    """The unbiased estimator against the mean over all choices of k samples, one by one."""
    rows = parquet.read_table(done / "math500.parquet").to_pylist()
    assert [(row["text"], row["gold"]) for row in rows] == SUMS
    assert 0 < sum(row["correct"] for row in rows) < N * len(rows)  # or nothing were told
    result = json.loads((done / "summary.json").read_text())["math500"]
    assert {f"pass@{k}" for k in (1, 2, 3, 4, 5, 6)} <= result.keys()
    for k in (1, 2, 3, 4, 5, 6):
        chances = [
            np.mean([any(some) for some in itertools.combinations(
                [1] * row["correct"] + [0] * (N - row["correct"]), k
            )])
            for row in rows
        ]  # fmt: skip
        assert result[f"pass@{k}"] == pytest.approx(np.mean(chances))
    of = N * len(rows)
    assert result["response_tokens"] == pytest.approx(sum(row["tokens"] for row in rows) / of)
    assert result["truncated"] == pytest.approx(sum(row["truncated"] for row in rows) / of)
    assert result[f"maj@{N}"] == np.mean([row["majority"] for row in rows])


def test_it_goes_on_and_ends_the_same(data, done, tmp_path, monkeypatch, capsys):
    """Cut off after two problems: those are not sampled again, and all is as it was."""
    (whole,), (other,) = (done.glob(f"{name}.*.0.jsonl") for name in ("math500", "gsm8k"))
    lines = whole.read_text().splitlines(keepends=True)
    for path in (done / "config.json", other):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / whole.name).write_text("".join(lines[:2]) + lines[2][:9])
    asked = []
    real = held_out.judge
    spied = lambda batches, *rest: real(
        (asked.extend({r.problem for r in batch}) or batch for batch in batches), *rest
    )
    monkeypatch.setattr(held_out, "judge", spied)
    assert sampled(data, tmp_path, "--benchmarks", "math500,gsm8k", "--k", "3,5") == 0
    before = {json.loads(line)["problem"] for line in lines[:2]}
    assert set(asked) == set(range(len(SUMS))) - before
    assert (tmp_path / "summary.json").read_text() == (done / "summary.json").read_text()
    tables = [parquet.read_table(x / "math500.parquet") for x in (tmp_path, done)]
    assert tables[0] == tables[1]
    assert re.search(r"mean .* ", capsys.readouterr().out)


def test_other_weights_or_words_are_not_taken_for_these(done, tmp_path):
    """The mark of what was sampled: a file that was written again, another file, another prompt."""
    weights_file = tmp_path / "model.safetensors"
    weights_file.write_bytes(b"1234")
    marks = [evaluate.mark(tmp_path, "jsonl:a", None)]
    assert marks[0] == evaluate.mark(tmp_path, "jsonl:a", None)
    marks += [evaluate.mark(tmp_path, "jsonl:b", None), evaluate.mark(tmp_path, "jsonl:a", "")]
    os.utime(weights_file, ns=(1, 1))
    marks.append(evaluate.mark(tmp_path, "jsonl:a", None))
    weights_file.write_bytes(b"12345")
    os.utime(weights_file, ns=(1, 1))
    marks.append(evaluate.mark(tmp_path, "jsonl:a", None))
    assert len(set(marks)) == 5


def test_others_responses_get_the_same_verdicts(data, tmp_path, capsys):
    records = [
        {"problem": place, "response": text, **more}
        for place, (_, gold) in enumerate(SUMS)
        for text, more in (
            (rf"so \boxed{{{gold}}}", {"tokens": 9}),
            (r"\boxed{1000}", {"tokens": 4, "finished": False}),
            ("1+1", {}),  # no box: no answer; three tokens of the config's tokenizer
        )
    ]
    file = tmp_path / "theirs.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in reversed(records)))
    for _ in range(2):  # judged anew each time
        flags = ("--benchmarks", "math500", "--responses", str(file))
        assert run(data, tmp_path / "run", *flags) == 0
        result = json.loads((tmp_path / "run/summary.json").read_text())["math500"]
        assert result["pass@1"] == pytest.approx(1 / 3) and result["pass@3"] == 1
        assert result["truncated"] == pytest.approx(1 / 3) and result["maj@3"] == 0.5
        three = len(tokenizer.load(weights.EMBEDDED / "tiny_arithmetic").encode(["1+1"])[0])
        assert result["response_tokens"] == pytest.approx((9 + 4 + three) / 3)
    capsys.readouterr()
    file.write_text("".join(json.dumps(record) + "\n" for record in records[:-1]))
    assert run(data, tmp_path / "run", "--benchmarks", "math500", "--responses", str(file)) == 2
    assert "has 2 responses to problem 4, and must have 3 to each" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags, says",
    [
        (["--benchmarks", "math501"], "there is no benchmark 'math501': it is one of math500"),
        (["--benchmarks", "amc23"], "has no file of amc23: it must be called amc23, and end in"),
        (["--benchmarks", "math500", "--k", "0"], "--k is '0': give whole numbers"),
        (["--benchmarks", "math500", "--samples", "0"], "--samples must be above 0"),
        (["--benchmarks", "math500", "--checkpoint", "nowhere"], "--checkpoint is nowhere: there"),
        (["--benchmarks", "math500", "--responses", "nowhere"], "there are no responses in nowh"),
        (["--benchmarks", "math500", "--what"], "unknown flag --what"),
    ],
)  # fmt: skip
def test_mistakes(data, tmp_path, flags, says, capsys):
    assert run(data, tmp_path, *flags) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    "line", ["no json", "[1]", '{"problem": "0", "response": "a"}', '{"a": 1}']
)
def test_a_damaged_file_of_responses(data, tmp_path, line, capsys):
    file = tmp_path / "theirs.jsonl"
    file.write_text('{"problem": 0, "response": "a"}\n' + line + "\n")
    assert run(data, tmp_path / "run", "--benchmarks", "math500", "--responses", str(file)) == 2
    assert 'theirs.jsonl, line 2: it must be {"problem": PLACE' in capsys.readouterr().err


def test_a_runs_workdir_is_its_policy(tmp_path):
    for folder in (tmp_path, tmp_path / "policy"):
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text("{}")
    assert evaluate.checkpoint_folder(str(tmp_path)) == tmp_path / "policy"
    assert evaluate.checkpoint_folder(str(tmp_path / "policy")) == tmp_path / "policy"


@pytest.mark.parametrize(
    "name, count",
    [("math500", 500), ("aime24", 30), ("aime25", 30), ("amc23", 40), ("minerva", 272),
     ("olympiad", 675), ("gsm8k", 1319)],
)  # fmt: skip
def test_the_real_files(shared_folder, name, count):
    problems = benchmarks.load(name, str(shared_folder / "data"))
    assert len(problems) == count and all(p.text and p.answer for p in problems)


def test_a_dataset_that_was_written_once(data, tmp_path):
    source = f"jsonl:{data / 'math500.jsonl'}"
    argv = [source, "--test", source, "--name", "math500", "--out", str(tmp_path)]
    assert rlvr_dataset.main(argv) == 0
    assert benchmarks.source_of("math500", str(tmp_path)) == f"tfds:{tmp_path}/math500/1.0.0/test"
    assert [(p.text, p.answer) for p in benchmarks.load("math500", str(tmp_path))] == SUMS


def test_gpqa_shuffles_and_remembers(tmp_path):
    rows = [
        {"Question": f"Q{i}?", "Correct Answer": "yes", "Incorrect Answer 1": "no",
         "Incorrect Answer 2": "maybe", "Incorrect Answer 3": "never"}
        for i in range(400)
    ]  # fmt: skip
    (tmp_path / "gpqa.jsonl").write_text("\n".join(map(json.dumps, rows)))
    problems = benchmarks.load("gpqa", str(tmp_path))
    for problem in problems:
        lines = dict(line.split(". ") for line in problem.text.splitlines() if line[1:2] == ".")
        assert lines[problem.answer] == "yes" and len(set(lines.values())) == 4
    counts = [sum(p.answer == letter for p in problems) for letter in "ABCD"]
    assert min(counts) > 70  # a hundred each, within four standard deviations
    assert problems == benchmarks.load("gpqa", str(tmp_path))


def test_ifeval_and_synlogic_rows(tmp_path):
    asked = {"key": 1, "prompt": "No commas.", "instruction_id_list": ["a:b"], "kwargs": [{"n": 1}]}
    (tmp_path / "ifeval.jsonl").write_text(json.dumps(asked))
    (problem,) = benchmarks.load("ifeval", str(tmp_path))
    assert (problem.text, problem.data) == (
        "No commas.", {"instruction_id_list": ["a:b"], "kwargs": [{"n": 1}]},
    )  # fmt: skip
    assert benchmarks.load("ifeval_loose", str(tmp_path)) == [problem]
    puzzle = {
        "prompt": [{"role": "user", "content": "Solve."}],
        "data_source": "val/sudoku",
        "extra_info": {"game_data_str": "{}"},
    }
    (tmp_path / "synlogic.jsonl").write_text(json.dumps(puzzle))
    (problem,) = benchmarks.load("synlogic", str(tmp_path))
    assert (problem.text, problem.kind) == ("Solve.", "sudoku")
    (tmp_path / "synlogic.jsonl").write_text(json.dumps({"prompt": "Solve."}))
    with pytest.raises(
        benchmarks.UserError, match="has not the fields of synlogic: it lacks 'data"
    ):
        benchmarks.load("synlogic", str(tmp_path))
