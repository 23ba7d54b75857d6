import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from fgrpo_jax import advantages, choices, config, shaping
from fgrpo_jax.estimators import make_advantage, mean_logp, shape_rewards
from fgrpo_jax.structs import Problem, Prompts, Rollouts

P, N, T = 3, 4, 10
PROBLEMS = (Problem("", "", "a"), Problem("", "", "b"), Problem("", "", "b"))


def rollouts(seed=0):
    random = np.random.RandomState(seed)
    correct = np.array([[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 0, 1]], np.float32)
    length = np.array([10, 4, 7, 8, 1, 2, 3, 10, 5, 6, 7, 9])
    return Rollouts(
        Prompts(
            np.zeros((P, 2), np.int32), np.ones(P, np.int32), np.arange(P, dtype=np.int32), PROBLEMS
        ),
        np.zeros((P * N, T), np.int32),
        np.arange(T) < length[:, None],
        -random.rand(P * N, T).astype(np.float32),
        length < T,
        correct.copy(),
        correct,
        np.ones((P, N), bool),
        ("",) * P * N,
        ("",) * P * N,
        -random.rand(P * N, T).astype(np.float32),
    )


def settings(**changes):
    c = config.default()
    for key, value in changes.items():
        section, _, leaf = key.partition("_")
        c[section][leaf] = value
    c.rollout.max_response = T
    return config.validate(c)


def test_by_default_nothing_is_shaped():
    before = rollouts()
    after = shape_rewards(settings(), before)
    np.testing.assert_array_equal(after.reward_PN, before.reward_PN)
    assert after.valid_PN.all()


def test_overlong():
    out = shape_rewards(settings(score_overlong_buffer=4, score_overlong_factor=0.5), rollouts())
    # lengths 10, 4, 7, 8 of at most 10: beyond 6, an eighth a token
    np.testing.assert_allclose(out.reward_PN[0], [1 - 0.5, 0, -0.125, 1 - 0.25])
    np.testing.assert_array_equal(out.correct_PN, rollouts().correct_PN)


def test_kl_in_the_reward():
    x = rollouts()
    out = shape_rewards(settings(kl_coef=0.1, kl_place="reward", kl_estimator="k1"), x)
    kl = np.where(x.mask_BT, x.sampler_logp_BT - x.ref_logp_BT, 0).sum(1).reshape(P, N)
    np.testing.assert_allclose(out.reward_PN, x.reward_PN - 0.1 * kl, rtol=1e-5, atol=1e-6)
    in_loss = shape_rewards(settings(kl_coef=0.1, kl_place="loss"), x)
    np.testing.assert_array_equal(in_loss.reward_PN, x.reward_PN)


def test_unlikeliness():
    x = rollouts()
    out = shape_rewards(settings(score_unlikeliness=0.5), x)
    expected = shaping.unlikeliness_reward(x.reward_PN, x.correct_PN, mean_logp(x), penalty=0.5)
    np.testing.assert_allclose(out.reward_PN, expected)
    assert (out.reward_PN[1] == 0).all() and (out.reward_PN[0] != x.reward_PN[0]).any()


def groups_at(position, correct=0.0, size=N):
    """Rollouts of prompts at these places in the stream, all right or all wrong."""
    P, problem = len(position), PROBLEMS[0]
    correct_PN, zeros_BT = np.full((P, size), correct, np.float32), np.zeros((P * size, 1))
    return Rollouts(
        Prompts(
            np.zeros((P, 2), np.int32),
            np.ones(P, np.int32),
            np.asarray(position, np.int32),
            (problem,) * P,
        ),
        zeros_BT.astype(np.int32),
        zeros_BT == 0,
        zeros_BT.astype(np.float32),
        np.ones(P * size, bool),
        correct_PN.copy(),
        correct_PN,
        np.ones((P, size), bool),
        ("",) * P * size,
        ("",) * P * size,
    )


def test_a_coin_pays_as_often_as_it_says_whatever_the_answers():
    c = settings(score_coin=0.3, score_wrong=-1.0)
    rewards = []
    for correct in (0, 1):
        out = shape_rewards(c, groups_at(range(5000), correct))
        assert (out.correct_PN == correct).all() and out.reward_PN.dtype == np.float32
        rewards.append(out.reward_PN)
    np.testing.assert_array_equal(*rewards)
    assert set(np.unique(rewards[0])) == {-1, 1}
    right_PN = rewards[0] == 1
    deviation = np.sqrt(0.3 * 0.7 / 20_000)
    assert abs(right_PN.mean() - 0.3) < 4 * deviation
    # neither the samples of a group nor a step's and the next's go together
    for one, other in ((right_PN[:, 0], right_PN[:, 1]), (right_PN[:-1, 0], right_PN[1:, 0])):
        assert abs(np.corrcoef(one, other)[0, 1]) < 4 / np.sqrt(5000)


def test_a_coin_is_thrown_by_seed_and_position_alone():
    """So a resumed run and hosts that share the rows have the same."""
    c = settings(score_coin=0.5)
    throw = lambda c, *position: shape_rewards(c, groups_at(position, size=16)).reward_PN
    whole = throw(c, *range(8))
    np.testing.assert_array_equal(
        whole, np.concatenate([throw(c, *range(4)), throw(c, 4, 5, 6, 7)])
    )
    np.testing.assert_array_equal(whole[[6, 2]], throw(c, 6, 2))
    assert len(np.unique(whole, axis=0)) == 8
    c.seed = 1
    assert (whole != throw(c, *range(8))).any()


def test_mean_logp_is_of_real_tokens():
    x = rollouts()
    expected = [logp[mask].mean() for logp, mask in zip(x.sampler_logp_BT, x.mask_BT, strict=True)]
    np.testing.assert_allclose(mean_logp(x).reshape(-1), expected, rtol=1e-5)


EXPECTED = {
    "grpo": lambda x, n: advantages.group_advantage(x.reward_PN, eps=1e-3),
    "mean_only": lambda x, n: advantages.mean_only_advantage(x.reward_PN),
    "batch_std": lambda x, n: advantages.batch_std_advantage(x.reward_PN, eps=1e-3),
    "rloo": lambda x, n: advantages.rloo_advantage(x.reward_PN),
    "leave_one_out": lambda x, n: advantages.leave_one_out_advantage(x.reward_PN, eps=1e-3),
    "opo": lambda x, n: advantages.opo_advantage(x.reward_PN, n),
    "reinforce_plus_plus_baseline": lambda x, n: advantages.reinforce_plus_plus_baseline_advantage(
        x.reward_PN, n
    ),
    "maxrl": lambda x, n: advantages.maxrl_advantage(x.reward_PN, eps=1e-3),
    "pkpo": lambda x, n: advantages.pkpo_advantage(x.reward_PN, 3),
    "grpo_passk": lambda x, n: advantages.grpo_passk_advantage(x.reward_PN, eps=1e-3),
    "ngrpo": lambda x, n: advantages.ngrpo_advantage(x.reward_PN, best=1.0, eps=1e-3),
    "ds_grpo": lambda x, n: (
        advantages.group_advantage(x.reward_PN, eps=1e-3, ddof=0)
        + shaping.differential_smoothing(x.correct_PN, mean_logp(x), right=0.2, wrong=0.3)
    ),
    "disco": lambda x, n: advantages.mean_only_advantage(
        # one problem of three is of kind a, two are of kind b
        x.reward_PN
        * np.log([[1 + 3], [1 + 1.5], [1 + 1.5]]).astype(np.float32)
        / (x.reward_PN.mean(1, keepdims=True) + 1e-5)
    ),
}


@pytest.mark.parametrize("name", choices.ADVANTAGES)
def test_advantages_by_name(name):
    c = settings(
        algo_advantage=name, algo_std_eps=1e-3, algo_pass_k=3, algo_smooth_right=0.2,
        algo_smooth_wrong=0.3,
    )  # fmt: skip
    x = rollouts()
    length_PN = jnp.asarray(x.mask_BT.sum(1).reshape(P, N))
    out = make_advantage(c, PROBLEMS)(x)
    np.testing.assert_allclose(out, EXPECTED[name](x, length_PN), rtol=1e-5, atol=1e-6)
    valid = np.ones((P, N), bool)
    valid[0, 0] = False
    out = make_advantage(c, PROBLEMS)(dataclasses.replace(x, valid_PN=valid))
    assert out[0, 0] == 0
