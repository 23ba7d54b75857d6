import json

import numpy as np
import pytest

from fgrpo_jax import StorageError, UserError, config
from fgrpo_jax.guard import Guard
from fgrpo_jax.structs import Problem, Prompts, Rollouts

FINE = {"skipped": 0, "groups_mixed": 0.5, "skipped/not_finite": 0}
BAD = {"skipped": 1, "groups_mixed": 0.5, "skipped/not_finite": 1}
CONSTANT = {"skipped": 0, "groups_mixed": 0.0, "skipped/not_finite": 0}


def rollouts():
    """Two prompts of two samples, three tokens."""
    problems = (Problem("1+1=", "2"), Problem("2+2=", "4"))
    prompts = Prompts(np.ones((2, 4), np.int32), np.full(2, 4), np.arange(2), problems)
    reward = np.array([[1, 0], [0, 0]], np.float32)
    return Rollouts(
        prompts,
        tokens_BT=np.arange(12, dtype=np.int32).reshape(4, 3),
        mask_BT=np.ones((4, 3), bool),
        sampler_logp_BT=np.full((4, 3), -0.5, np.float32),
        finished_B=np.ones(4, bool),
        reward_PN=reward,
        correct_PN=reward,
        valid_PN=np.ones((2, 2), bool),
        responses=("2", "3", "5", "6"),
        verdicts=("right", "wrong", "wrong", "wrong"),
    )


def guard(folder, records=(), tell=print, **changes):
    c = config.default()
    for key, value in changes.items():
        c.guard[key] = value
    return Guard(c, folder / "bad_batch", list(records), tell)


def look(g, *records, first=1):
    for step, record in enumerate(records, first):
        g({"step": step, **record}, rollouts(), np.ones((2, 2), np.float32))


def test_nothing_happens_where_all_is_well(tmp_path):
    look(guard(tmp_path), FINE, FINE, CONSTANT)
    assert not list(tmp_path.iterdir())


def test_not_finite_ends_the_run_and_keeps_the_batch(tmp_path):
    with pytest.raises(UserError) as error:
        look(guard(tmp_path), FINE, BAD)
    text = str(error.value)
    assert "step 2: loss or gradient is not finite (1 skipped); the batch is" in text
    assert "the same command goes on after it" in text
    with np.load(tmp_path / "bad_batch/step_2.0.npz", allow_pickle=False) as kept:
        np.testing.assert_array_equal(kept["tokens_BT"], rollouts().tokens_BT)
        np.testing.assert_array_equal(kept["advantage_PN"], np.ones((2, 2)))
        np.testing.assert_array_equal(kept["position_P"], [0, 1])
    first, *lines = (tmp_path / "bad_batch/step_2.0.jsonl").read_text().splitlines()
    assert json.loads(first) == {"step": 2, **BAD}
    assert [json.loads(line)["response"] for line in lines] == ["2", "3", "5", "6"]
    assert json.loads(lines[2]) == {
        "problem": "2+2=", "answer": "4", "response": "5", "verdict": "wrong",
    }  # fmt: skip


def test_skipping_goes_on_for_so_many_steps_running(tmp_path):
    told = []
    g = guard(tmp_path, on_not_finite="skip", skips=3, tell=told.append)
    look(g, BAD, BAD, FINE, BAD, BAD)
    assert len(told) == 4 and all("not finite" in text for text in told)
    with pytest.raises(UserError, match=r"step 6: .*in 3 steps running \(guard.skips\)"):
        look(g, BAD, first=6)


@pytest.mark.parametrize(
    "reason, key, words",
    [("spike", "on_spike", "gradient norm is above"), ("drift", "on_drift", "differ by more")],
)
def test_other_reasons(tmp_path, reason, key, words):
    record = {**FINE, "skipped": 2, f"skipped/{reason}": 2}
    told = []
    look(guard(tmp_path, tell=told.append, **{key: "skip"}), record)
    assert words in told[0] and "(2 skipped)" in told[0]
    with pytest.raises(UserError, match=words):
        look(guard(tmp_path, **{key: "end"}), record)


def test_groups_that_are_constant_for_long(tmp_path):
    g = guard(tmp_path, constant=3)
    look(g, CONSTANT, CONSTANT, FINE, CONSTANT, CONSTANT)
    with pytest.raises(UserError, match="no group had both right and wrong answers in 3 steps"):
        look(g, CONSTANT)


def test_a_resumed_run_counts_on(tmp_path):
    g = guard(tmp_path, [FINE, CONSTANT, CONSTANT], constant=3)
    with pytest.raises(UserError, match="in 3 steps"):
        look(g, CONSTANT)


def test_a_disk_that_refuses_is_a_storage_error(tmp_path):
    (tmp_path / "bad_batch").write_text("a file in the folder's place")
    with pytest.raises(StorageError, match="bad_batch"):
        look(guard(tmp_path), BAD)


def test_only_so_many_batches_are_kept(tmp_path):
    told = []
    g = guard(tmp_path, on_not_finite="skip", keep=2, tell=told.append)
    look(g, BAD, BAD, BAD)
    names = {path.name for path in (tmp_path / "bad_batch").glob("*.npz")}
    assert names == {"step_1.0.npz", "step_2.0.npz"}
    assert "guard.keep, 2, batches were kept before" in told[2]
    look(g, BAD, first=2)  # the step again, after a restart
