import json

import numpy as np
import pytest

from fgrpo_jax import UserError, config, prompts, tokenizer, weights


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
    assert tiny.decode(loaded.tokens[0]) == tiny.render("0? {}", "S")


def test_long_prompts_are_dropped_and_counted(tmp_path, tiny):
    rows = [{"problem": "1" * n, "answer": "1"} for n in (1, 50, 2, 60)]
    loaded = load(jsonl(tmp_path / "a.jsonl", rows), tiny)
    assert [p.text for p in loaded.problems] == ["1", "11"] and loaded.dropped == 2


def test_all_too_long(tmp_path, tiny):
    source = jsonl(tmp_path / "a.jsonl", [{"problem": "1" * 50, "answer": "1"}])
    with pytest.raises(UserError, match="all 1 prompts .* longer than data.max_prompt, 24 tokens"):
        load(source, tiny)


@pytest.mark.parametrize(
    "content, message",
    [
        ("", "has no problem: it is empty"),
        ('{"problem": "1", "answer": "1"}\n{"problem": "2"}\n', "line 2: not a JSON object"),
        ("[1]\n", "line 1"),
        ("nonsense\n", "line 1"),
    ],
)
def test_bad_files(tmp_path, tiny, content, message):
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        load(f"jsonl:{path}", tiny)


def test_broken_utf8_and_no_file(tmp_path, tiny):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"problem": "\xff"}')
    with pytest.raises(UserError, match="a.jsonl cannot be read"):
        load(f"jsonl:{path}", tiny)
    with pytest.raises(UserError, match="does not exist"):
        load("jsonl:/nowhere.jsonl", tiny)


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


def test_batches_of_a_held_out_set_are_filled_up(tmp_path, tiny):
    loaded = load(numbered(tmp_path, 7), tiny)
    batches = list(prompts.batches_of(loaded, 6, 4, slice(None)))
    assert [p.text for b in batches for p in b.problems] == list("012345")
    assert batches[1].length_P.tolist()[2:] == [0, 0]
    assert len(list(prompts.batches_of(loaded, 100, 4, slice(None)))) == 2
