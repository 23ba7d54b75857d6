import json

import jax
import numpy as np
import pytest
from test_rollouts import C, N, prompt_set, scripted, text_of

from fgrpo_jax import rewards, tokenizer, weights
from fgrpo_jax.evaluate import make_evaluate
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
    stale = {"problem": 1, "samples": N + 1, "correct": 5}
    (folder / "step_3.0.jsonl").write_text(json.dumps(stale) + "\n")
    evaluate = make(tiny, scorer, tmp_path, scripted(tiny, SAYS))
    check(evaluate(None, jax.random.key(0), step=3))


def test_all_done_before_needs_no_sampling(tiny, scorer, tmp_path):
    folder = tmp_path / "evaluation"
    folder.mkdir()
    lines = [{"problem": i, "samples": N, "correct": int(c)} for i, c in enumerate(COUNTS)]
    (folder / "step_0.0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    evaluate = make(tiny, scorer, tmp_path, lambda *_: pytest.fail("sampled"))
    check(evaluate(None, jax.random.key(0), step=0))
