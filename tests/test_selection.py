import dataclasses

import jax
import numpy as np
import pytest
from test_estimators import N, P, rollouts

from fgrpo_jax import UserError
from fgrpo_jax.selection import join, make_draw, mixed_groups, most_varied, take
from fgrpo_jax.structs import Problem, Prompts


def labelled(start):
    """Rollouts whose every entry tells its prompt and sample; prompt p has p % 5 of 4 right."""
    x = rollouts()
    prompt = np.arange(start, start + P)
    row = (prompt[:, None] * 100 + np.arange(N)).reshape(-1)
    correct = (np.arange(N) < (prompt % 5)[:, None]).astype(np.float32)
    return dataclasses.replace(
        x,
        prompts=Prompts(
            np.repeat(prompt[:, None], 2, 1).astype(np.int32),
            prompt.astype(np.int32),
            prompt.astype(np.int32),
            tuple(Problem(str(p), "") for p in prompt),
        ),
        tokens_BT=np.repeat(row[:, None], 10, 1).astype(np.int32),
        reward_PN=row.reshape(P, N).astype(np.float32),
        correct_PN=correct,
        responses=tuple(map(str, row)),
        verdicts=tuple(map(str, row)),
    )


def consistent(x):
    """Every part of each group is of that group, and of each row of that row."""
    row = x.reward_PN.reshape(-1)
    assert x.tokens_BT[:, 0].tolist() == row.tolist()
    assert [float(r) for r in x.responses] == [float(v) for v in x.verdicts] == row.tolist()
    assert (x.reward_PN // 100 == x.prompts.position_P[:, None]).all()
    assert [int(p.text) for p in x.prompts.problems] == x.prompts.position_P.tolist()
    assert (x.prompts.tokens_PC[:, 0] == x.prompts.position_P).all()
    for name in "mask_BT sampler_logp_BT finished_B ref_logp_BT".split():
        assert len(getattr(x, name)) == len(row)


def test_take_and_join():
    whole = join([labelled(0), labelled(3)])
    consistent(whole)
    assert whole.prompts.position_P.tolist() == [0, 1, 2, 3, 4, 5]
    part = take(whole, np.array([4, 1]), np.array([[3, 0], [1, 2]]))
    consistent(part)
    assert part.reward_PN.tolist() == [[403, 400], [101, 102]]
    original = rollouts()
    same = take(original, np.array([2]), np.array([[1]]))
    np.testing.assert_array_equal(same.sampler_logp_BT[0], original.sampler_logp_BT[2 * N + 1])


def test_mixed_groups_are_by_valid_raw_correctness():
    x = labelled(0)  # none, one, two right of four
    assert mixed_groups(x).tolist() == [False, True, True]
    valid = np.ones((P, N), bool)
    valid[1, 0] = False  # the only right one
    assert mixed_groups(dataclasses.replace(x, valid_PN=valid)).tolist() == [False, False, True]
    none = dataclasses.replace(x, valid_PN=np.zeros((P, N), bool))
    assert not mixed_groups(none).any()


def test_without_dynamic_sampling_each_step_is_a_batch():
    draw = make_draw(
        lambda params, prompts, key, watch: labelled(prompts), lambda i: i * P, 1, False
    )
    out, drawn, position = draw(None, 4, jax.random.key(0))
    assert out is drawn and position == 5
    assert out.prompts.position_P.tolist() == [12, 13, 14]


def test_dynamic_sampling_draws_until_the_batch_is_full():
    draw = make_draw(
        lambda params, prompts, key, watch: labelled(prompts), lambda i: i * P, 3, True
    )
    out, drawn, position = draw(None, 0, jax.random.key(0))
    consistent(out)
    # of prompts 0 1 2 | 3 4 5 those right 0 or 4 times of 4 are dropped
    assert out.prompts.position_P.tolist() == [1, 2, 3] and position == 2
    assert drawn.prompts.position_P.tolist() == [0, 1, 2, 3, 4, 5]
    out, _, position = draw(None, position, jax.random.key(0))
    assert out.prompts.position_P.tolist() == [6, 7, 8] and position == 3


def test_dynamic_sampling_ends():
    draw = make_draw(lambda params, prompts, key, watch: labelled(0), lambda i: i, 1, True)
    with pytest.raises(UserError, match="^1 batches of prompts gave 2 groups .* step needs 3: rai"):
        draw(None, 0, jax.random.key(0))


def test_most_varied():
    x = labelled(0)
    assert most_varied(x, 0) is x
    out = most_varied(x, 2)
    consistent(out)
    assert out.reward_PN.tolist() == [[p * 100, p * 100 + 3] for p in range(P)]  # the ends
