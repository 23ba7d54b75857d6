import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from fgrpo_jax import aggregators, kl, losses

B, T = 4, 6
quick = settings(deadline=None, max_examples=25)


def one(ratio, advantage, loss=losses.ppo_clip, **bounds):
    """The loss of a single token."""
    logp, zero = jnp.full((1, 1), np.log(ratio), jnp.float32), jnp.zeros((1, 1))
    return float(loss(logp, zero, jnp.full((1, 1), advantage, jnp.float32), **bounds)[0, 0])


@pytest.mark.parametrize(
    "ratio, advantage, expected",
    [
        (1.0, 2.0, -2.0),
        (1.1, 2.0, -2.2),
        (1.5, 2.0, -2.56),  # paid up to 1 + 0.28
        (0.5, 2.0, -1.0),
        (0.5, -2.0, 1.6),  # no further than 1 - 0.2
        (1.5, -2.0, 3.0),
        (4.0, -2.0, 6.0),  # dual clip at 3
        (4.0, 2.0, -2.56),
    ],
)
def test_ppo_clip_by_hand(ratio, advantage, expected):
    assert one(ratio, advantage, clip_low=0.2, clip_high=0.28) == pytest.approx(expected, rel=1e-6)


def test_without_dual_clip():
    assert one(4.0, -2.0, dual_clip=0.0) == pytest.approx(8.0, rel=1e-6)


@pytest.mark.parametrize("ratio, weight", [(0.5, 0.5), (1.0, 1.0), (7.0, 6.0), (1e-8, 1e-8)])
def test_cispo_by_hand(ratio, weight):
    logp = np.log(ratio)
    assert one(ratio, 3.0, losses.cispo) == pytest.approx(-weight * 3 * logp, rel=1e-5, abs=1e-12)
    gradient = jax.grad(lambda x: losses.cispo(x, jnp.zeros((1, 1)), jnp.full((1, 1), 3.0)).sum())
    out = gradient(jnp.full((1, 1), logp, jnp.float32)).item()
    assert out == pytest.approx(-3 * weight, rel=1e-5)


LOGP = jnp.log(jnp.array([[2.0, 8.0, 5.0], [0.25, 0.25, 7.0]]))  # the last column is masked
MASK = jnp.array([[True, True, False]] * 2)
ZERO = jnp.zeros((2, 3))


@pytest.mark.parametrize("loss", [losses.gspo, losses.gspo_token])
def test_gspo_by_hand(loss):
    """Geometric means 4 and 1/4; bounds 0.5 and 1.5."""
    advantage = jnp.array([[3.0], [-3.0]])
    bounds = {"clip_low": 0.5, "clip_high": 0.5}
    out = loss(LOGP, ZERO, advantage, MASK, **bounds)
    np.testing.assert_allclose(out[:, :2], [[-4.5, -4.5], [1.5, 1.5]], rtol=1e-6)
    out = loss(LOGP, ZERO, -advantage, MASK, **bounds)
    np.testing.assert_allclose(out[:, :2], [[12, 12], [-0.75, -0.75]], rtol=1e-6)
    # d/d logp of the mean over the row's two tokens: -A s / 2
    mean = lambda x: jnp.where(MASK, loss(x, ZERO, -advantage, MASK, **bounds), 0).sum() / 2
    np.testing.assert_allclose(
        jax.grad(mean)(LOGP), [[6, 6, 0], [-0.375, -0.375, 0]], rtol=1e-6, atol=1e-7
    )


def test_gspo_token_takes_advantages_by_token():
    advantage = jnp.array([[1.0, 2.0, 9.0], [0.0, 0.0, 9.0]])
    loss = lambda x: losses.gspo_token(x, x, advantage, MASK)
    np.testing.assert_allclose(loss(LOGP)[:, :2], -advantage[:, :2])
    grad = jax.grad(
        lambda x: jnp.where(MASK, losses.gspo_token(x, LOGP, advantage, MASK), 0).sum()
    )(LOGP)
    np.testing.assert_allclose(grad, -jnp.where(MASK, advantage, 0))


def test_gmpo_by_hand():
    """d = (ln 2, ln 8) and (ln 1/4, ln 1/4), clipped above at 0.4 where A > 0, else below."""
    out = losses.gmpo(LOGP, ZERO, jnp.array([[2.0], [-2.0]]), MASK)
    np.testing.assert_allclose(out[:, 0], [-2 * np.exp(0.4), 2 * np.exp(-0.4)], rtol=1e-6)
    out = losses.gmpo(LOGP, ZERO, jnp.array([[-2.0], [2.0]]), MASK)
    np.testing.assert_allclose(out[:, 0], [2 * 4, -2 * 0.25], rtol=1e-6)


@pytest.mark.parametrize("ratio, advantage", [(1.0, 2.0), (3.0, 2.0), (3.0, -2.0), (0.1, -1.0)])
def test_sapo_by_hand(ratio, advantage):
    tau = 1.0 if advantage > 0 else 1.05
    expected = -advantage * 4 / tau / (1 + np.exp(-tau * (ratio - 1)))
    assert one(ratio, advantage, losses.sapo) == pytest.approx(expected, rel=1e-6)


def test_sapo_on_policy_is_the_policy_gradient():
    grad = jax.grad(lambda x: losses.sapo(x, jnp.zeros((1, 2)), jnp.array([[3.0, -3.0]])).sum())
    np.testing.assert_allclose(grad(jnp.zeros((1, 2))), [[-3, 3]], rtol=1e-6)


def test_is_clipped():
    ratio = jnp.array([[1.3, 1.3, 0.7, 0.7, 1.0]])
    advantage = jnp.array([[1.0, -1.0, 1.0, -1.0, 1.0]])
    out = losses.is_clipped(ratio, advantage, 0.2, 0.2)
    assert out.tolist() == [[True, False, False, True, False]]


def test_importance_weights_by_hand():
    old = jnp.log(jnp.array([[4.0, 0.25, 1.5, 9.0]]))
    zero, mask = jnp.zeros((1, 4)), jnp.array([[True, True, True, False]])
    truncate, masked = losses.truncated_importance_weight, losses.masked_importance_weight
    close = lambda out, expected: np.testing.assert_allclose(out[:, :3], [expected], rtol=1e-6)
    close(truncate(old, zero, mask), [2, 0.25, 1.5])
    close(truncate(old, zero, mask, level="sequence"), [1.5] * 3)
    close(truncate(old, zero, mask, level="sequence", high=1.2), [1.2] * 3)
    close(masked(old, zero, mask), [4, 0, 1.5])
    close(masked(old, zero, mask, level="sequence"), [1.5] * 3)
    close(masked(old, zero, mask, level="sequence", high=1.2), [0] * 3)
    assert not jax.grad(lambda x: truncate(x, zero, mask).sum())(old).any()
    with pytest.raises(ValueError, match="must be token or sequence"):
        truncate(old, zero, mask, level="row")


SURROGATES = {
    "ppo_clip": lambda logp, old, adv, mask: losses.ppo_clip(logp, old, adv),
    "cispo": lambda logp, old, adv, mask: losses.cispo(logp, old, adv),
    "gspo": losses.gspo,
    "gspo_token": losses.gspo_token,
    "gmpo": losses.gmpo,
    "sapo": lambda logp, old, adv, mask: losses.sapo(logp, old, adv),
    "reinforce": lambda logp, old, adv, mask: losses.policy_gradient(logp, adv),
    "tis": lambda logp, old, adv, mask: (
        losses.policy_gradient(logp, adv)
        * losses.truncated_importance_weight(logp, old, mask, level="sequence")
    ),
    "icepop": lambda logp, old, adv, mask: (
        losses.policy_gradient(logp, adv) * losses.masked_importance_weight(logp, old, mask)
    ),
    **{
        name: lambda logp, old, adv, mask, f=estimate: f(logp, old)
        for name, estimate in kl.ESTIMATORS.items()
    },
}
AGGREGATORS = {
    "token_mean": aggregators.token_mean,
    "sequence_mean_token_mean": aggregators.sequence_mean_token_mean,
    "sequence_mean_token_sum": aggregators.sequence_mean_token_sum,
    "constant_length": lambda loss, mask: aggregators.constant_length(loss, mask, length=T),
}
every_surrogate = pytest.mark.parametrize("name", SURROGATES)
every_pair = pytest.mark.parametrize(  # the two do not know of each other
    "name, aggregator",
    [(name, "token_mean") for name in SURROGATES] + [("gspo", name) for name in AGGREGATORS],
)


@st.composite
def batches(draw):
    """Log-probabilities, old ones, advantages, and a mask with a token in the first row."""
    random = np.random.RandomState(draw(st.integers(0, 2**31 - 1)))
    logp, old = (-np.abs(random.randn(B, T)).astype(np.float32) for _ in range(2))
    mask = (
        np.arange(T)
        < np.array([draw(st.integers(1, T)), *random.randint(0, T + 1, B - 1)])[:, None]
    )
    return tuple(map(jnp.asarray, (logp, old, random.randn(B, 1).astype(np.float32), mask)))


@functools.partial(jax.jit, static_argnums=(0, 1))
def value_and_grad(name, aggregator, logp, old, advantage, mask):
    """The aggregator's sum and count, and the gradient of the sum."""

    def loss(logp):
        return AGGREGATORS[aggregator](SURROGATES[name](logp, old, advantage, mask), mask)

    (total, count), vjp = jax.vjp(loss, logp)
    return total, count, vjp((jnp.float32(1), jnp.float32(0)))[0]


def same(a, b, rtol=1e-5, atol=1e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b)


@every_pair
@quick
@given(batch=batches(), junk=st.sampled_from([-1e4, -3.0, 0.0, 5.0, 1e4]))
def test_masked_values_move_nothing(name, aggregator, batch, junk):
    logp, old, advantage, mask = batch
    total, count, grad = value_and_grad(name, aggregator, *batch)
    other = value_and_grad(
        name,
        aggregator,
        jnp.where(mask, logp, junk),
        jnp.where(mask, old, -junk / 2),
        advantage,
        mask,
    )
    same((total, count, grad), other, rtol=1e-6)
    assert not grad[~mask].any()


@every_pair
@quick
@given(batch=batches())
def test_splitting_the_batch_moves_nothing(name, aggregator, batch):
    total, count, grad = value_and_grad(name, aggregator, *batch)
    parts = [
        value_and_grad(name, aggregator, *(x[rows] for x in batch))
        for rows in (slice(0, 1), slice(1, 2), slice(2, 3), slice(3, 4))
    ]
    totals, counts, grads = zip(*parts, strict=True)
    same((sum(totals), sum(counts), jnp.concatenate(grads)), (total, count, grad), 1e-5, 1e-5)


@every_surrogate
@pytest.mark.parametrize("gap", [-1e4, 1e4])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_extreme_ratios_are_finite(name, gap, sign):
    logp, advantage = jnp.full((B, T), gap), jnp.full((B, 1), sign)
    for rows in ((logp, jnp.zeros((B, T))), (jnp.zeros((B, T)), logp)):
        out = value_and_grad(name, "token_mean", *rows, advantage, jnp.ones((B, T), bool))
        assert all(np.isfinite(x).all() for x in out)


@every_surrogate
def test_bfloat16_is_computed_in_float32(name):
    random = np.random.RandomState(0)
    logp, old = (jnp.asarray(-np.abs(random.randn(B, T)), jnp.bfloat16) for _ in range(2))
    advantage, mask = jnp.asarray(random.randn(B, 1), jnp.bfloat16), jnp.ones((B, T), bool)
    out = SURROGATES[name](logp, old, advantage, mask)
    wide = (x.astype(jnp.float32) for x in (logp, old, advantage))
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(out, SURROGATES[name](*wide, mask))
    grad = jax.grad(lambda x: SURROGATES[name](x, old, advantage, mask).sum())(logp)
    assert grad.dtype == jnp.bfloat16


@every_pair
def test_inside_jit_grad_vmap_scan_and_shard_map(name, aggregator):
    random = np.random.RandomState(1)
    shape = (3, 8, T)
    logp, old = (jnp.asarray(-np.abs(random.randn(*shape)), jnp.float32) for _ in range(2))
    advantage = jnp.asarray(random.randn(3, 8, 1), jnp.float32)
    mask = jnp.asarray(random.rand(*shape) < 0.8)

    def loss(logp, old, advantage, mask):
        total, count = AGGREGATORS[aggregator](SURROGATES[name](logp, old, advantage, mask), mask)
        return total / count

    rows = (logp, old, advantage, mask)
    step = jax.jit(jax.value_and_grad(loss))
    expected = [step(*(x[i] for x in rows)) for i in range(3)]
    expected = jax.tree.map(lambda *xs: jnp.stack(xs), *expected)
    same(jax.jit(jax.vmap(jax.value_and_grad(loss)))(*rows), expected)
    _, scanned = jax.lax.scan(lambda carry, xs: (carry, jax.value_and_grad(loss)(*xs)), 0, rows)
    same(scanned, expected)

    P = PartitionSpec

    def sharded(*rows):
        total, count = AGGREGATORS[aggregator](SURROGATES[name](*rows), rows[-1])
        return jax.lax.psum(total, "x") / jax.lax.psum(count, "x")

    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.shard_map(sharded, mesh=mesh, in_specs=(P("x"),) * 4, out_specs=P())
    same(
        jax.jit(jax.value_and_grad(spread))(*(x[0] for x in rows)),
        jax.tree.map(lambda x: x[0], expected),
    )


def test_kl_by_hand():
    logp, ref = jnp.array([[-1.0, -2.0]]), jnp.array([[-3.0, -2.0]])
    np.testing.assert_allclose(kl.k1(logp, ref), [[2, 0]])
    np.testing.assert_allclose(kl.absolute(ref, logp), [[2, 0]])
    np.testing.assert_allclose(kl.k2(logp, ref), [[2, 0]])
    np.testing.assert_allclose(kl.k3(logp, ref), [[np.exp(-2) + 1, 0]], rtol=1e-6)
    assert kl.k3(logp, logp + 5).tolist() == [[10, 10]]  # exp(5) - 6 > 10
    np.testing.assert_allclose(
        kl.k3(logp, logp + 5, highest=float("inf")), np.exp(5) - 6, rtol=1e-6
    )


def test_k3_of_near_policies_does_not_cancel():
    x = jnp.float32(1e-3)
    out = float(kl.k3(jnp.full((1, 1), 0.0), jnp.full((1, 1), x))[0, 0])
    assert out == pytest.approx(np.expm1(1e-3) - 1e-3, rel=1e-3)


def test_estimators_are_unbiased_over_the_policy():
    """Sums over a distribution's four tokens: k1 and k3 give its KL; k2 and the + its gradient."""
    logits, ref = (
        jnp.array([0.3, -1.0, 0.5, 0.1]),
        jax.nn.log_softmax(jnp.array([0.1, 0.2, 0.3, -1])),
    )
    exact = lambda z: (jax.nn.softmax(z) * (jax.nn.log_softmax(z) - ref)).sum()
    p = jax.nn.softmax(logits)

    def expected(estimate, z):  # the samples' own distribution is held
        return (p * estimate(jax.nn.log_softmax(z)[None], ref[None])[0]).sum()

    for name in ("k1", "k3", "k1+", "k3+"):
        np.testing.assert_allclose(expected(kl.ESTIMATORS[name], logits), exact(logits), rtol=1e-5)
    for name in ("k2", "k1+", "k3+"):
        grad = jax.grad(lambda z, f=kl.ESTIMATORS[name]: expected(f, z))(logits)
        np.testing.assert_allclose(grad, jax.grad(exact)(logits), rtol=1e-4, atol=1e-6)
