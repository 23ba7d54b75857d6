import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fgrpo_jax import UserError, config, prompts, sources, tokenizer, weights
from fgrpo_jax.structs import Problem


@pytest.fixture(scope="module")
def tiny():
    return tokenizer.load(weights.EMBEDDED / "tiny_arithmetic")


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"jsonl:{path}"


def numbered(tmp_path, count):
    return jsonl(tmp_path / "a.jsonl", [{"problem": f"{i}", "answer": i} for i in range(count)])


def load(source, tokenizer, **data):
    c = config.default()
    c.data.update(data)
    return prompts.load(c, source, "train", tokenizer)


def dropped(loaded):
    assert list(loaded.dropped) == list(prompts.REASONS)
    return {reason: count for reason, count in loaded.dropped.items() if count}


def test_prompts_end_in_the_last_column(tmp_path, tiny):
    loaded = load(numbered(tmp_path, 12), tiny)
    batch = loaded.batch(np.array([3, 11]), np.array([0, 1]))
    for row, text in enumerate(["3", "11"]):
        (ids,) = tiny.encode([tiny.render(text)])
        assert batch.length_P[row] == len(ids)
        assert batch.tokens_PC[row, -len(ids) :].tolist() == ids
    assert [p.answer for p in batch.problems] == ["3", "11"]


def test_template_and_system_are_in_the_prompt(tmp_path, tiny):
    loaded = load(numbered(tmp_path, 1), tiny, system="S", template="{problem}? {}", max_prompt=40)
    assert tiny.decode(loaded.tokens[0].tolist()) == tiny.render("0? {}", "S")


def test_long_prompts_are_dropped_and_counted(tmp_path, tiny):
    rows = [{"problem": "1" * n, "answer": "1"} for n in (1, 50, 2, 60)]
    loaded = load(jsonl(tmp_path / "a.jsonl", rows), tiny)
    assert [p.text for p in loaded.problems] == ["1", "11"] and dropped(loaded) == {"too long": 2}


def test_all_too_long(tmp_path, tiny):
    source = jsonl(tmp_path / "a.jsonl", [{"problem": "1" * 50, "answer": "1"}])
    with pytest.raises(UserError, match="all 1 prompts .* longer than data.max_prompt, 24 tokens"):
        load(source, tiny)


def test_what_cannot_be_judged_is_dropped_by_reason(tmp_path, tiny):
    rows = [
        ("1", "5"), ("2", "5"), ("2", "6"), ("3", ""), ("3", "7"), ("4", "x"), ("1", "5"),
        ("1 ", "5"), ("2", "5"), ("4", "8"), ("5", "1,000"), ("5", "1000"), ("9" * 50, "1"),
        ("9" * 50, "1"), ("6", "x"),
    ]  # fmt: skip
    source = jsonl(tmp_path / "a.jsonl", [{"problem": p, "answer": a} for p, a in rows])
    asked = []

    def check(golds):
        asked.extend(golds)
        return [gold != "x" for gold in golds]

    loaded = prompts.load(config.default(), source, "train", tiny, check)
    assert [(p.text, p.answer) for p in loaded.problems] == [
        ("1", "5"), ("3", "7"), ("4", "8"), ("5", "1,000"),
    ]  # fmt: skip
    assert dropped(loaded) == {
        "too long": 1, "empty gold": 1, "unparsable gold": 2, "contradicting duplicate": 3,
        "duplicate": 4,
    }  # fmt: skip
    assert sorted(asked) == sorted({a for _, a in rows if a})  # each once, the empty one never
    assert len(loaded.problems) + sum(loaded.dropped.values()) == len(rows)
    assert dropped(load(source, tiny))["contradicting duplicate"] == 5  # unchecked: 4 is x and 8


def test_nothing_left(tmp_path, tiny):
    source = jsonl(tmp_path / "a.jsonl", [{"problem": "1", "answer": a} for a in ("", "2", "3")])
    with pytest.raises(UserError, match="can be used: 1 empty gold, 2 contradicting duplicate$"):
        load(source, tiny)


def test_generated_problems_may_repeat(tiny):
    loaded = load("arithmetic:1+1", tiny)
    assert len(loaded.problems) == sources.ARITHMETIC and not dropped(loaded)


def test_a_problem_with_data_is_judged_by_it(monkeypatch, tiny):
    problems = [Problem("1", a, data={"entry": d}) for a, d in [("", 1), ("2", 2), ("3", 2)]]
    monkeypatch.setattr(prompts.sources, "read", lambda *_: problems)
    loaded = prompts.load(config.default(), "jsonl:x", "train", tiny, lambda golds: [])
    assert loaded.problems == (problems[0], problems[1]) and dropped(loaded) == {"duplicate": 1}


def test_duplicates_over_sources_and_what_is_left_of_each(tmp_path, tiny):
    a = numbered(tmp_path, 3)
    b = jsonl(tmp_path / "b.jsonl", [{"problem": str(i), "answer": i} for i in range(5)])
    loaded = load(f"{a}+{b}", tiny)
    assert [p.kind for p in loaded.problems] == ["a"] * 3 + ["b"] * 2
    assert dropped(loaded) == {"duplicate": 3} and loaded.weights == loaded.sizes == ()
    loaded = load(f"3*{a}+1*{b}", tiny)
    assert loaded.weights == (3, 1) and loaded.sizes == (3, 2)
    with pytest.raises(UserError, match="a.jsonl has a weight, and none of its problems can be"):
        load(f"3*{b}+1*{a}", tiny)


def stream(loaded, steps, size, seed=0, share=slice(None)):
    return [
        problem.text
        for step in steps
        for problem in prompts.batch_at(loaded, step, size, seed, share).problems
    ]


def test_each_epoch_has_each_problem_once_in_a_new_order(tmp_path, tiny):
    loaded = load(numbered(tmp_path, 12), tiny)
    first, second = stream(loaded, range(3), 4), stream(loaded, range(3, 6), 4)
    assert sorted(first) == sorted(second) == sorted(str(i) for i in range(12))
    assert first != second and first != stream(loaded, range(3), 4, seed=1)
    assert stream(loaded, range(6), 4) == first + second


def test_hosts_share_a_step(tmp_path, tiny):
    loaded = load(numbered(tmp_path, 10), tiny)
    for step in range(5):  # across epochs too
        whole = stream(loaded, [step], 4)
        halves = [stream(loaded, [step], 4, share=s) for s in (slice(0, 2), slice(2, 4))]
        assert halves[0] + halves[1] == whole


def test_positions_are_never_used_twice(tmp_path, tiny):
    loaded = load(numbered(tmp_path, 3), tiny)
    positions = [
        p for step in range(4) for p in prompts.batch_at(loaded, step, 4, 0, slice(None)).position_P
    ]
    assert positions == list(range(16))


SOURCES = {"a": 5, "b": 3, "c": 11}  # problems of each


def mixed(sizes, weights):
    problems = [Problem(f"{name}{i}", "1", name) for name, n in sizes.items() for i in range(n)]
    tokens = tuple(np.array([1], np.int32) for _ in problems)
    counts = tuple(sizes.values()) if weights else ()
    return prompts.PromptSet(tuple(problems), tokens, 4, {}, counts, weights)


def texts(loaded, step, hosts, size, seed):
    """Each host's part of a step."""
    each = size // hosts
    shares = [slice(host * each, (host + 1) * each) for host in range(hosts)]
    return [stream(loaded, [step], size, seed, share) for share in shares]


@pytest.mark.parametrize("weights", [(), (0.7, 0.2, 0.1), (1.0, 1.0, 1.0)])
@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    stop=st.integers(0, 11),  # steps, of which an epoch has 19 / 4
    before=st.sampled_from([1, 2, 4]),
    after=st.sampled_from([1, 2, 4]),
)
def test_a_resumed_run_goes_on_as_if_it_had_never_stopped(weights, seed, stop, before, after):
    whole = [texts(mixed(SOURCES, weights), step, 1, 4, seed)[0] for step in range(12)]
    first = [texts(mixed(SOURCES, weights), step, before, 4, seed) for step in range(stop)]
    second = [texts(mixed(SOURCES, weights), step, after, 4, seed) for step in range(stop, 12)]
    for step, hosts in enumerate(first + second):
        assert sum(hosts, []) == whole[step]


def test_at_an_epoch_s_very_end():
    whole = stream(mixed({"a": 8}, ()), range(4), 4)  # of two steps an epoch
    for step in range(4):
        halves = texts(mixed({"a": 8}, ()), step, 2, 4, 0)
        assert sum(halves, []) == whole[step * 4 : step * 4 + 4]
    assert sorted(whole[:8]) == sorted(whole[8:]) and whole[:8] != whole[8:]


def test_a_mixture_keeps_its_weights_and_each_source_its_epochs():
    loaded = mixed(SOURCES, (0.7, 0.2, 0.1))
    drawn = stream(loaded, range(3), 100)
    for name, weight in zip(SOURCES, loaded.weights, strict=True):
        mine = [text for text in drawn if text[0] == name]
        assert abs(len(mine) - weight * len(drawn)) <= 2
        size = SOURCES[name]
        epochs = [mine[i : i + size] for i in range(0, len(mine) - size + 1, size)]
        assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) > 1
    assert drawn[:100] != stream(loaded, [0], 100, seed=1)


def test_sources_of_one_size_are_shuffled_apart():
    drawn = stream(mixed({"a": 9, "b": 9}, (1.0, 1.0)), [0], 18)
    a, b = ([int(text[1:]) for text in drawn if text[0] == name] for name in "ab")
    assert sorted(a) == sorted(b) == list(range(9)) and a != b


def test_mixing_needs_grain_and_nothing_else_does(tmp_path, tiny, monkeypatch):
    monkeypatch.setitem(sys.modules, "grain", None)
    source = numbered(tmp_path, 12)
    assert sorted(stream(load(source, tiny), [0], 12)) == sorted(map(str, range(12)))
    with pytest.raises(UserError, match="has weights, and grain mixes: pip install grain, or give"):
        load(f"0.5*{source}+0.5*{source}", tiny)


def run(*arguments):
    command = [sys.executable, "-m", "fgrpo_jax.prompts", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_command_prints_what_a_run_would_see(tmp_path):
    rows = [{"q": "1" * n, "answer": n} for n in (1, 2, 2, 3, 40)]
    source = jsonl(tmp_path / "a.jsonl", rows)
    folder = weights.EMBEDDED / "tiny_arithmetic"
    flags = ["--fields", "problem=q", "--system", "S"]
    out = run(source, "--tokenizer", folder, "--max_prompt", 50, *flags)
    assert out.returncode == 0, out.stderr
    found = json.loads(out.stdout)
    assert (found["source"], found["rows"], found["kept"]) == (source, 5, 3)
    assert found["dropped"] == {reason: 0 for reason in prompts.REASONS} | {
        "too long": 1,
        "duplicate": 1,
    }
    tiny = tokenizer.load(folder)
    shortest, longest = (len(tiny.encode([tiny.render(text, "S")])[0]) for text in ("1", "111"))
    assert found["unit"] == "tokens" and list(found["length"]) == "min p50 p90 p99 max".split()
    assert (found["length"]["min"], found["length"]["max"]) == (shortest, longest)
    assert found["examples"][1] == {"prompt": tiny.render("11", "S"), "gold": "2"}

    found = json.loads(run(source, *flags).stdout)
    assert found["unit"] == "characters" and found["length"]["max"] == 42  # with S and newline
    assert found["kept"] == 4 and found["examples"][0] == {"prompt": "S\n1", "gold": "1"}


def test_mistakes_in_the_command(tmp_path, capsys):
    source = numbered(tmp_path, 2)
    folder = str(weights.EMBEDDED / "tiny_arithmetic")
    for arguments, message in (
        (["csv:x"], "the source is 'csv:x': it must be arithmetic"),
        (["jsonl:/nowhere"], "does not exist"),
        ([source, "--max_prompt", "9"], "--max_prompt counts tokens: give --tokenizer too"),
        ([source, "--tokenizer", folder, "--max_prompt", "0"], "--max_prompt is 0: it must be"),
        ([source, "--tokenizer", folder, "--max_prompt", "1"], "2 prompts of"),
        ([source, "--tokenizer", str(tmp_path)], "has no tokenizer.json"),
        ([source, "--fields", "problem"], "data.fields has 'problem'"),
        ([source, "--fields", "problem=x"], "data.fields says problem=x, which data file"),
    ):
        assert prompts.main(arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and message in error and error.count("\n") == 1


BIG = """
import resource, sys, time
from fgrpo_jax import config, prompts, tokenizer
from pathlib import Path
c = config.default()
c.data.max_prompt = 1024
tokens = tokenizer.load(Path(sys.argv[2]))
tokens.encode(["warm"])
memory = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
begin, before = time.process_time(), memory()
loaded = prompts.load(c, sys.argv[1], "train", tokens)
print(len(loaded.problems), time.process_time() - begin, memory() - before)
"""


@pytest.mark.slow
def test_a_hundred_thousand_prompts_load_in_half_a_minute_and_a_gigabyte(tmp_path, shared_folder):
    words = (
        "Find the number of apples that Ann and Bob have if $x^2 + {i} = y$ and so on. " * 4
    )  # 120 tokens
    rows = ({"problem": words.replace("{i}", str(i)), "answer": i} for i in range(100_000))
    source = jsonl(tmp_path / "a.jsonl", rows)
    folder = tmp_path / "qwen"
    folder.mkdir()
    for path in (shared_folder / "qwen2_5_tokenizer").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "config.json").write_text('{"eos_token_id": 151643}')
    command = [sys.executable, "-c", BIG, source, str(folder)]
    out = subprocess.run(command, capture_output=True, text=True, check=True)
    count, seconds, gigabytes = map(float, out.stdout.split())
    print(out.stdout)
    assert count == 100_000 and seconds < 30 and gigabytes < 1
