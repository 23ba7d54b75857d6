import json

import jax
import numpy as np
import pytest
from test_rollouts import C, N, prompt_set, scripted, text_of

from fgrpo_jax import rewards, structs, tokenizer, weights
from fgrpo_jax.held_out import FIELDS, Answered, Tallies, judge, make_evaluate, summary
from fgrpo_jax.pass_at_k import pass_at_k

SAYS = lambda prompt, j: "1" if j <= prompt else "22222"
COUNTS = np.array([1, 0, 3, 4])  # of the first four problems, whose golds are below
GOLDS = ["1", "9", "1", "1", "1"]


@pytest.fixture(scope="module")
def tiny():
    return tokenizer.load(weights.EMBEDDED / "tiny_arithmetic")


@pytest.fixture(scope="module")
def scorer():
    with rewards.Scorer("exact", 1, 1.0) as scorer:
        yield scorer


def make(tiny, scorer, folder, stream, multiple=1, problems=4):
    held_out = prompt_set(tiny, GOLDS)
    return make_evaluate(
        stream, text_of(tiny), scorer, held_out, problems, N, multiple, folder / "evaluation"
    )


def check(out):
    for k in (1, 2, 4):
        assert out[f"pass@{k}"] == pytest.approx(pass_at_k(COUNTS, N, k).mean())
    # "1" is two tokens with its stop, "22222" comes to none within five
    assert out["response_tokens"] == (17 + 14 + 11 + 8) / 16 and out["truncated"] == 6 / 16
    assert out["maj@4"] == (0 + 0 + 1 + 1) / 4  # 22222; a tie of 22222 and 1, both wrong; 1; 1
    assert out["by_kind"] == {"kind0": pytest.approx(4 / 8), "kind1": pytest.approx(4 / 8)}


@pytest.mark.parametrize("chunk, multiple", [(1, 1), (3, 1), (100, 8), (2, 3)])
def test_pass_at_k_of_a_stream(tiny, scorer, tmp_path, chunk, multiple):
    seen = []

    def stream(params, prompts, key, watch):
        seen.append(prompts)
        return scripted(tiny, SAYS, chunk)(params, prompts, key, watch)

    evaluate = make(tiny, scorer, tmp_path, stream, multiple)
    check(evaluate(None, jax.random.key(0), step=0))
    assert len(seen[0].length_P) % multiple == 0 and len(seen[0].problems) == 4
    assert seen[0].tokens_PC.shape[1] == C
    (file,) = (tmp_path / "evaluation").iterdir()
    found = [json.loads(line) for line in file.read_text().splitlines()]
    assert {x["problem"]: x["correct"] for x in found} == dict(enumerate(COUNTS))


def test_an_interrupted_evaluation_goes_on(tiny, scorer, tmp_path):
    """What was done is not sampled again; of what was not, all is."""
    asked = []

    def dying(params, prompts, key, watch):
        asked.append(prompts.position_P.tolist())
        for number, some in enumerate(scripted(tiny, SAYS, 1)(params, prompts, key, watch)):
            if number == 11 and len(asked) == 1:  # of problems 3 and 2 all, of problem 1 a part
                raise KeyboardInterrupt
            yield some

    evaluate = make(tiny, scorer, tmp_path, dying)
    with pytest.raises(KeyboardInterrupt):
        evaluate(None, jax.random.key(0), step=7)
    (file,) = (tmp_path / "evaluation").iterdir()
    done = [json.loads(line)["problem"] for line in file.read_text().splitlines()]
    assert done == [3]  # a few chunks of scores may be awaited still
    with file.open("a") as half:
        half.write('5\n{"problem": 2, "samp')  # killed while writing
    check(evaluate(None, jax.random.key(0), step=7))
    assert asked == [[0, 1, 2, 3], [0, 1, 2]]


def test_counts_of_another_number_of_samples_are_not_taken(tiny, scorer, tmp_path):
    folder = tmp_path / "evaluation"
    folder.mkdir()
    stale = {"problem": 1, "samples": N + 1, "correct": 5, "truncated": 0, "tokens": 10}
    stale["majority"] = 1.0
    (folder / "step_3.0.jsonl").write_text(json.dumps(stale) + "\n")
    evaluate = make(tiny, scorer, tmp_path, scripted(tiny, SAYS))
    check(evaluate(None, jax.random.key(0), step=3))


def test_all_done_before_needs_no_sampling(tiny, scorer, tmp_path):
    folder = tmp_path / "evaluation"
    folder.mkdir()
    tallies = zip(COUNTS.tolist(), (3, 2, 1, 0), (17, 14, 11, 8), (0.0, 0.0, 1.0, 1.0), strict=True)
    lines = [
        {"problem": i, "samples": N} | dict(zip(FIELDS, tally, strict=True))
        for i, tally in enumerate(tallies)
    ]
    (folder / "step_0.0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    evaluate = make(tiny, scorer, tmp_path, lambda *_: pytest.fail("sampled"))
    check(evaluate(None, jax.random.key(0), step=0))


@pytest.mark.parametrize(
    "reward, gold, answers, correct, majority",
    [
        ("number", "1000", ["1,000", "1000.0", "7", "8"], 2, 1.0),  # one answer, written twice
        ("number", "1", ["1", "1", "2", "2"], 2, 0.5),  # a tie is drawn
        ("number", "1", ["1", "2", "2", "words"], 1, 0.0),
        ("number", "1", ["words"] * 4, 0, 0.0),  # no answer at all
        ("math", "x", ["\\boxed{x}", "no box", "no box", "no box"], 1, 1.0),  # of those that answer
    ],
)
def test_majority_by_hand(tmp_path, reward, gold, answers, correct, majority):
    problems = [structs.Problem("?", gold)]
    tallies = Tallies(tmp_path / "tallies.jsonl", 4)
    with rewards.Scorer(reward, 1, 5.0) as scorer:
        judge([[Answered(0, text, 3, True)] for text in answers], problems, scorer, tallies)
    out = summary(tallies.table(1), problems, 4, ks=(1, 3))
    assert out["maj@4"] == majority and out["pass@1"] == correct / 4
    assert set(out) == {"pass@1", "pass@3", "maj@4", "response_tokens", "truncated", "by_kind"}
    again = Tallies(tmp_path / "tallies.jsonl", 4)
    assert again.done == tallies.done


def test_a_reward_without_answers_has_no_majority(tmp_path):
    problems = [structs.Problem("?", "")]
    tallies = Tallies(tmp_path / "tallies.jsonl", 2)
    with rewards.Scorer("operator:ne", 1, 5.0) as scorer:  # any callable: it fails, and is wrong
        judge([[Answered(0, "a", 1, True)] * 2], problems, scorer, tallies)
    assert "maj@2" not in summary(tallies.table(1), problems, 2)
