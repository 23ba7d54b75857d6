import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fgrpo_jax import advantages, shaping
from fgrpo_jax.advantages import focal_weight, group_advantage, success_rate

P, N = 4, 8
quick = settings(deadline=None, max_examples=25)
LENGTHS = jnp.arange(1, 2 * P * N + 1).reshape(2 * P, N)
ESTIMATORS = {  # f(rewards, valid)
    "grpo": advantages.group_advantage,
    "mean_only": advantages.mean_only_advantage,
    "batch_std": advantages.batch_std_advantage,
    "rloo": advantages.rloo_advantage,
    "leave_one_out": advantages.leave_one_out_advantage,
    "opo": lambda r, v=None: advantages.opo_advantage(r, LENGTHS[: len(r), : r.shape[1]], v),
    "maxrl": advantages.maxrl_advantage,
    "pkpo": lambda r, v=None: advantages.pkpo_advantage(r, 2, v),
    "grpo_passk": advantages.grpo_passk_advantage,
    "ngrpo": advantages.ngrpo_advantage,
    "reinforce_plus_plus_baseline": lambda r, v=None: (
        advantages.reinforce_plus_plus_baseline_advantage(r, jnp.ones_like(r), v)
    ),
}
BY_GROUP = [
    name for name in ESTIMATORS if name not in ("batch_std", "reinforce_plus_plus_baseline")
]
SHIFT_FREE = [name for name in ESTIMATORS if name not in ("maxrl", "ngrpo")]
every = pytest.mark.parametrize("name", ESTIMATORS)


def test_by_hand():
    # mean 1/4, Bessel's variance (3 * 1/16 + 9/16) / 3 = 1/4, std 1/2
    out = group_advantage(jnp.array([[1.0, 0.0, 0.0, 0.0]]))
    np.testing.assert_allclose(out, [[1.5, -0.5, -0.5, -0.5]], rtol=3e-6)
    out = group_advantage(jnp.array([[1.0, 0.0, 0.0, 0.0]]), ddof=0, eps=0.0)
    np.testing.assert_allclose(out, [[np.sqrt(3), *[-1 / np.sqrt(3)] * 3]], rtol=1e-6)


def test_against_numpy_for_every_group_of_eight():
    groups = np.array(list(itertools.product([0.0, 1.0], repeat=8)), np.float32)
    mean, std = groups.mean(1, keepdims=True), groups.std(1, ddof=1, keepdims=True)
    np.testing.assert_allclose(
        group_advantage(jnp.asarray(groups)), (groups - mean) / (std + 1e-6), atol=1e-5
    )


@every
@pytest.mark.parametrize("samples", [2, 3, 8])
def test_a_constant_group_is_exactly_zero(name, samples):
    value_P = np.array([0.0, 1.0, 0.7, 0.1, 1 / 3, 1e-8, 12345.678])
    out = ESTIMATORS[name](jnp.asarray(np.repeat(value_P[:, None], samples, 1), jnp.float32))
    if name == "ngrpo":  # it compares with a sample of 1
        assert (np.sign(out) == np.sign(value_P - 1)[:, None]).all()
    else:
        assert not np.any(out)


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name not in ("pkpo", "ngrpo")])
def test_a_group_of_one_is_zero(name):
    assert not np.any(ESTIMATORS[name](jnp.array([[0.3], [1.0]])))


def test_nearly_constant_is_not_constant():
    # (+-d / 2) / (d / sqrt 2 + eps), d = 1e-5 rounded to float32
    d = float(np.float32(1.00001) - np.float32(1))
    rewards, expected = jnp.array([[1.0, 1.00001]]), d / 2 / (d / np.sqrt(2) + 1e-6)
    np.testing.assert_allclose(group_advantage(rewards), [[-expected, expected]], rtol=0.01)
    np.testing.assert_allclose(advantages.rloo_advantage(rewards), [[-d, d]], rtol=0.01)
    assert (advantages.leave_one_out_advantage(jnp.array([[1, 1.00001, 1.00002]]))[0, 0]) < 0


def test_leave_one_out_by_hand():
    """Others of 3 in (3, 1, 2): mean 1.5, Bessel's std sqrt 0.5; of 1: 2.5; of 2: 2, sqrt 2."""
    out = advantages.leave_one_out_advantage(jnp.array([[3.0, 1.0, 2.0]]))
    root = np.sqrt(0.5)
    np.testing.assert_allclose(out, [[1.5 / root, -1.5 / root, 0]], rtol=1e-5, atol=1e-6)
    # all others equal: undivided, as in a pair
    out = advantages.leave_one_out_advantage(
        jnp.array([[1.0, 0.0, 0.0, 0.0], [1.0, 0.5, 0.5, 0.5]])
    )
    np.testing.assert_allclose(out[:, 0], [1, 0.5], rtol=1e-6)
    np.testing.assert_allclose(
        out[0, 1:], np.full(3, -1 / 3 / (np.std([1, 0, 0], ddof=1) + 1e-6)), rtol=1e-5
    )
    out = advantages.leave_one_out_advantage(jnp.array([[1.0, 0.0]]))
    assert out.tolist() == [[1, -1]]


def test_opo_by_hand():
    rewards, lengths = jnp.array([[1.0, 0.0, 0.0]]), jnp.array([[2, 3, 5]])
    np.testing.assert_allclose(
        advantages.opo_advantage(rewards, lengths), [[0.8, -0.2, -0.2]], rtol=1e-6
    )


def test_maxrl_by_hand():
    out = advantages.maxrl_advantage(jnp.array([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]]))
    np.testing.assert_allclose(out, [[1, -1], [0, 0], [0, 0]], rtol=1e-5)


def test_ngrpo_by_hand():
    """(1, 0, 0) with a virtual 1: mean 1/2, Bessel's std sqrt 1/3."""
    out = advantages.ngrpo_advantage(jnp.array([[1.0, 0.0, 0.0]]))
    np.testing.assert_allclose(out, np.array([[1, -1, -1]]) * np.sqrt(3) / 2, rtol=1e-5)
    assert (advantages.ngrpo_advantage(jnp.zeros((1, 8))) < 0).all()
    assert not advantages.ngrpo_advantage(jnp.ones((1, 8))).any()


def test_grpo_passk_by_hand():
    std = np.std([0.25, 1.0, 0.5], ddof=1)
    out = advantages.grpo_passk_advantage(jnp.array([[0.25, 1.0, 0.5], [1.0, 1.0, 0.0]]))
    np.testing.assert_allclose(out, [[0, 0.5 / (std + 1e-6), 0], [0, 0, 0]], rtol=1e-6)


@pytest.mark.parametrize("k", range(1, 7))
def test_pkpo_against_all_subsets(k):
    """w_i is the mean, over the subsets of k - 1 others, of what i adds to their best."""
    rewards = np.random.RandomState(k).randn(6).astype(np.float32).round(1)
    rewards[3] = rewards[1]
    w = np.zeros(6)
    for i in range(6):
        others = [r for j, r in enumerate(rewards) if j != i]
        bests = [max(s) for s in itertools.combinations(others, k - 1)] if k > 1 else [0.0]
        w[i] = np.mean([max(rewards[i], best) - best for best in bests]) if k > 1 else rewards[i]
    expected = 6 / 5 * (w - w.mean())
    out = advantages.pkpo_advantage(jnp.asarray(rewards)[None], k)
    np.testing.assert_allclose(out[0], expected, rtol=1e-4, atol=1e-6)
    ragged = advantages.pkpo_advantage(
        jnp.array([[9.0, *rewards, -9.0]]), k, jnp.array([[False, *[True] * 6, False]])
    )
    np.testing.assert_allclose(ragged[0], [0, *expected, 0], rtol=1e-4, atol=1e-6)


def test_pkpo_in_closed_form_and_its_limits():
    """MaxRL's code: C(n - c, k - 1) / C(n - 1, k - 1) for each of c right ones, then RLOO."""
    for right in range(9):
        w = (
            np.array([1.0] * right + [0.0] * (8 - right))
            * math.comb(8 - right, 3)
            / math.comb(7, 3)
        )
        rewards = jnp.array([[1.0] * right + [0.0] * (8 - right)])
        np.testing.assert_allclose(
            advantages.pkpo_advantage(rewards, 4)[0], 8 / 7 * (w - w.mean()), atol=1e-6
        )
    few = jnp.array([[True, True, False, False]])
    assert not advantages.pkpo_advantage(jnp.array([[1.0, 0.0, 1.0, 0.0]]), 3, few).any()
    assert np.isfinite(advantages.pkpo_advantage(jnp.eye(1, 1200), 600)).all()
    with pytest.raises(ValueError, match="k is 9: it must be in 1 ... 8"):
        advantages.pkpo_advantage(jnp.zeros((1, 8)), 9)


def test_reinforce_plus_plus_by_hand():
    """Returns of rewards (1, 2, 4 | 8): 7, 6, 4 and 8; whitened over four tokens."""
    rewards = jnp.array([[1.0, 2.0, 4.0], [8.0, 100.0, 100.0]])
    mask = jnp.array([[True, True, True], [True, False, False]])
    returns = np.array([7, 6, 4, 8])
    white = (returns - returns.mean()) / returns.std(ddof=1)
    out = advantages.reinforce_plus_plus_advantage(rewards, mask)
    np.testing.assert_allclose(out, [white[:3], [white[3], 0, 0]], rtol=1e-5)
    same = jnp.full((2, 3), 0.7)  # whose rounding must not be blown up
    one = jnp.array([[True, False, False]] * 2)
    assert not advantages.reinforce_plus_plus_advantage(same, one).any()
    out = advantages.reinforce_plus_plus_advantage(rewards, mask, discount=0.5)
    returns = np.array([1 + 1 + 1, 2 + 2, 4, 8])
    white = (returns - returns.mean()) / returns.std(ddof=1)
    np.testing.assert_allclose(out[0], white[:3], rtol=1e-5)


@st.composite
def reward_groups(draw):
    random = np.random.RandomState(draw(st.integers(0, 2**31 - 1)))
    if draw(st.booleans()):
        return random.randint(0, 2, (P, N)).astype(np.float32)
    return random.rand(P, N).astype(np.float32)


@every
@quick
@given(rewards=reward_groups(), seed=st.integers(0, 99))
def test_invalid_samples_leave_the_statistics(name, rewards, seed):
    valid = np.random.RandomState(seed).rand(P, N) < 0.6
    junk = np.where(valid, rewards, 1e3 * np.random.RandomState(seed + 1).randn(P, N))
    first, second = (
        np.asarray(ESTIMATORS[name](jnp.asarray(x, jnp.float32), jnp.asarray(valid)))
        for x in (rewards, junk)
    )
    np.testing.assert_allclose(first, second, rtol=1e-5, atol=1e-6)
    assert not first[~valid].any()
    weights = [
        focal_weight(jnp.asarray(x, jnp.float32), 0.5, jnp.asarray(valid)) for x in (rewards, junk)
    ]
    np.testing.assert_array_equal(*weights)


@pytest.mark.parametrize("name", BY_GROUP)
@quick
@given(rewards=reward_groups(), count=st.integers(2, N - 1))
def test_a_ragged_group_is_the_shorter_group(name, rewards, count):
    valid = jnp.broadcast_to(jnp.arange(N) < count, (P, N))
    ragged = ESTIMATORS[name](jnp.asarray(rewards), valid)[:, :count]
    np.testing.assert_allclose(
        ragged, ESTIMATORS[name](jnp.asarray(rewards[:, :count])), rtol=1e-4, atol=1e-5
    )


@every
@quick
@given(rewards=reward_groups(), seed=st.integers(0, 99))
def test_permuting_permutes(name, rewards, seed):
    random = np.random.RandomState(seed)
    groups, samples = random.permutation(P), random.permutation(N)
    if name == "opo":  # its lengths stay where they are
        groups, samples = np.arange(P), np.arange(N)
    out = np.asarray(ESTIMATORS[name](jnp.asarray(rewards)))
    other = ESTIMATORS[name](jnp.asarray(rewards[groups][:, samples]))
    np.testing.assert_allclose(other, out[groups][:, samples], rtol=1e-4, atol=1e-5)
    rate = success_rate(jnp.asarray(rewards))
    np.testing.assert_allclose(
        success_rate(jnp.asarray(rewards[groups][:, samples])), rate[groups], rtol=1e-6
    )


@pytest.mark.parametrize("name", SHIFT_FREE)
@quick
@given(rewards=reward_groups(), shift=st.sampled_from([-1.0, 0.5, 2.0]))
def test_adding_a_constant_moves_nothing(name, rewards, shift):
    rewards = jnp.asarray(np.round(rewards * 64) / 64)  # the shifted ones are exact
    np.testing.assert_allclose(
        ESTIMATORS[name](rewards + shift), ESTIMATORS[name](rewards), rtol=1e-4, atol=1e-5
    )


@every
def test_inside_jit_vmap_scan_and_without_nan_gradients(name):
    rewards = jnp.asarray(np.random.RandomState(3).randint(0, 2, (5, P, N)), jnp.float32)
    rewards = rewards.at[0, 0].set(0).at[1, 1].set(1)
    weighted = lambda r: ESTIMATORS[name](r) * focal_weight(r, 0.5)[:, None]
    expected = jnp.stack([weighted(r) for r in rewards])
    np.testing.assert_allclose(jax.jit(jax.vmap(weighted))(rewards), expected, rtol=1e-5, atol=1e-6)
    _, scanned = jax.lax.scan(lambda carry, r: (carry, weighted(r)), 0, rewards)
    np.testing.assert_allclose(scanned, expected, rtol=1e-5, atol=1e-6)
    for r in (*rewards, jnp.ones((P, N)), jnp.eye(N)[:P] + 0.5):
        assert np.isfinite(jax.grad(lambda r: (weighted(r) ** 2).sum())(r)).all()


@every
def test_bfloat16_is_computed_in_float32(name):
    rewards = jnp.asarray(np.random.RandomState(4).rand(P, N), jnp.bfloat16)
    out = ESTIMATORS[name](rewards)
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(out, ESTIMATORS[name](rewards.astype(jnp.float32)))


PAPER = {  # its unit values for N = 8, k right
    0.5: [1, 0.9354, 0.8660, 0.7906, 0.7071, 0.6124, 0.5, 0.3536, 0],
    1.0: [1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0],
    2.0: [1, 0.7656, 0.5625, 0.3906, 0.25, 0.1406, 0.0625, 0.0156, 0],
    0.0: [1] * 9,
}


@pytest.mark.parametrize("gamma", PAPER)
@pytest.mark.parametrize("wrong, right", [(0.0, 1.0), (-1.0, 1.0), (-0.1, 0.7), (2.0, 5.0)])
def test_focal_weights_of_the_paper(gamma, wrong, right):
    rewards = jnp.array([[right] * k + [wrong] * (8 - k) for k in range(9)])
    out = focal_weight(rewards, gamma, wrong=wrong, right=right)
    np.testing.assert_allclose(out, PAPER[gamma], atol=5e-5)
    rate = success_rate(rewards, wrong=wrong, right=right)
    np.testing.assert_allclose(rate, np.arange(9) / 8, atol=1e-7)
    assert (out[0], out[8], rate[0], rate[8]) == (1, 0 if gamma else 1, 0, 1)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 2.0])
def test_focal_weight_is_exact_at_the_ends_for_every_group_size(gamma):
    """Compiled as 1 - sum / N, an all-right group of 6 comes out below 0, and its root as NaN."""
    for samples in (*range(1, 65), 80, 96, 100, 160, 1000):
        ends = jnp.stack([jnp.zeros(samples), jnp.ones(samples)])
        assert focal_weight(ends, gamma).tolist() == [1, 0 if gamma else 1], samples


def test_focal_weight_is_exact_at_the_ends():
    ends = jnp.array([[0.0] * 8, [1.0] * 8])
    for gamma in (0.3, 1.0, 50.0):
        assert focal_weight(ends, gamma).tolist() == [1, 0]
    assert focal_weight(ends, 0.0).tolist() == [1, 1]
    with pytest.raises(ValueError, match="gamma is -1.0: it must be at least 0"):
        focal_weight(ends, -1.0)
    with pytest.raises(ValueError, match="wrong must be below right"):
        focal_weight(ends, 1.0, wrong=1.0, right=1.0)


def test_rewards_that_were_computed_are_exact_at_the_ends_too():
    """wrong + (right - wrong) * score misses `right` by an ulp for one pair in five."""
    tenths = np.arange(-20, 20, 3) / 10
    for wrong, right in itertools.combinations(tenths, 2):
        score = np.array([[0.0] * 6, [1.0] * 6], np.float32)
        rewards = np.float32(wrong) + np.float32(right - wrong) * score
        out = focal_weight.__wrapped__(jnp.asarray(rewards), 0.1, None, wrong, right)
        assert out.tolist() == [1, 0], (wrong, right)


@pytest.mark.parametrize("name", SHIFT_FREE)
def test_a_large_offset_rounds_nothing_away(name):
    rewards = jnp.array([[1.0, 0, 0, 1, 0, 0, 0], [3, 2, 0, 1, 1, 0, 3]])
    np.testing.assert_allclose(
        ESTIMATORS[name](rewards + 1e6), ESTIMATORS[name](rewards), rtol=1e-4, atol=1e-5
    )


def test_without_eps():
    """Constant groups stay 0, others are divided by the very statistic."""
    rewards = jnp.array([[0.0] * 4, [1.0] * 4, [1.0, 0.0, 0.0, 0.0]])
    np.testing.assert_allclose(
        advantages.maxrl_advantage(rewards, eps=0.0), [[0] * 4, [0] * 4, [3, -1, -1, -1]]
    )
    assert not advantages.group_advantage(rewards, eps=0.0)[:2].any()


def test_invalid_samples_may_hold_anything():
    rewards = jnp.array([[1.0, 0.0, 0.5, jnp.nan]])
    valid = jnp.array([[True, True, True, False]])
    for name in ESTIMATORS:
        out = ESTIMATORS[name](rewards, valid)
        assert np.isfinite(out).all() and out[0, 3] == 0, name
        grad = jax.grad(lambda r, f=ESTIMATORS[name]: (f(r, valid) ** 2).sum())(rewards)
        assert np.isfinite(grad[0, :3]).all(), name


def test_graded_rewards_have_their_normalised_mean():
    rewards = jnp.array([[-1.0, 0.0, 0.5, 1.0]])
    np.testing.assert_allclose(success_rate(rewards, wrong=-1.0), [(0 + 0.5 + 0.75 + 1) / 4])
    out = focal_weight(rewards, 1.0, wrong=-1.0)
    np.testing.assert_allclose(out, [1 - 2.25 / 4])


def test_focal_weight_passes_no_gradient():
    grad = jax.grad(lambda r: focal_weight(r, 0.5).sum())
    for rewards in (jnp.ones((1, 8)), jnp.zeros((1, 8)), jnp.array([[1.0, 0.5]])):
        assert not grad(rewards).any()


def test_focal_advantage_in_closed_form():
    # with gamma 1/2 and the population std, A- = -sqrt(mu), A+ = (1 - mu) / sqrt(mu)
    for right in range(1, 8):
        group = jnp.array([[1.0] * right + [0.0] * (8 - right)])
        out = group_advantage(group) * focal_weight(group, 0.5)[:, None] * np.sqrt(8 / 7)
        mu = right / 8
        np.testing.assert_allclose(out[0, 0], (1 - mu) / np.sqrt(mu), rtol=1e-5)
        np.testing.assert_allclose(out[0, -1], -np.sqrt(mu), rtol=1e-5)


def test_the_focal_rate_is_of_raw_correctness():
    """A shaped reward moves the advantage, not the weight."""
    correct = jnp.array([[1.0, 1.0, 0.0, 0.0]])
    shaped = correct + shaping.overlong_penalty(jnp.array([[90, 100, 10, 10]]), 100, 20)
    assert float(focal_weight(correct, 1.0)[0]) == 0.5
    assert group_advantage(shaped)[0, 0] != group_advantage(shaped)[0, 1]
