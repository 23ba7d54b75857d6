"""Each part of the loss is in it, with its own coefficient and sign."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fgrpo_jax import aggregators, choices, config, kl, losses
from fgrpo_jax.objective import Objective, aggregate, clipped, make_objective, token_loss
from fgrpo_jax.structs import LearnerBatch

B, T = 4, 6


def case(seed=0):
    """logp, entropy, old_logp, rows."""
    random = np.random.RandomState(seed)
    logp, old, sampler, ref = (-np.abs(random.randn(B, T)).astype(np.float32) for _ in range(4))
    length = np.array([6, 3, 1, 4])
    rows = LearnerBatch(
        tokens_BS=None,
        start_B=None,
        mask_BT=jnp.arange(T)[None] < length[:, None],
        advantage_B=jnp.asarray(random.randn(B), jnp.float32),
        sampler_logp_BT=jnp.asarray(sampler),
        ref_logp_BT=jnp.asarray(ref),
        length_BN=jnp.asarray(np.stack([np.roll(length, -i) for i in range(4)])),
    )
    entropy = jnp.asarray(random.rand(B, T), jnp.float32)
    return jnp.asarray(logp), entropy, jnp.asarray(old), rows


def total_loss(o, seed=0, exponent=0.0):
    logp, entropy, old, rows = case(seed)
    loss, report = token_loss(o, logp, entropy, old, rows, jnp.float32(exponent))
    total, count = aggregate(o, loss, rows.mask_BT)
    return float(total / count), report


def by_hand(loss_of):
    logp, entropy, old, rows = case()
    total, count = aggregators.token_mean(
        loss_of(logp, entropy, old, rows, rows.advantage_B[:, None]), rows.mask_BT
    )
    return pytest.approx(float(total / count), rel=1e-5, abs=1e-7)


PPO = Objective("ppo_clip", 0.2, 0.28, 3.0)
REINFORCE = Objective("reinforce")


def with_(o, **changes):
    return Objective(**(vars(o) | changes))


@pytest.mark.parametrize(
    "o, loss_of",
    [
        (PPO, lambda logp, _, old, rows, a: losses.ppo_clip(logp, old, a, 0.2, 0.28, 3.0)),
        (
            Objective("cispo", 0.5, 0.6),
            lambda logp, _, old, rows, a: losses.cispo(logp, old, a, 0.5, 0.6),
        ),
        (
            Objective("gspo", 0.1, 0.2),
            lambda logp, _, old, rows, a: losses.gspo(logp, old, a, rows.mask_BT, 0.1, 0.2),
        ),
        (
            Objective("gspo_token", 0.1, 0.2),
            lambda logp, _, old, rows, a: losses.gspo_token(logp, old, a, rows.mask_BT, 0.1, 0.2),
        ),
        (
            Objective("gmpo", 0.3, 0.4),
            lambda logp, _, old, rows, a: losses.gmpo(logp, old, a, rows.mask_BT, 0.3, 0.4),
        ),
        (
            Objective("sapo", tau_right=2.0, tau_wrong=3.0),
            lambda logp, _, old, rows, a: losses.sapo(logp, old, a, 2.0, 3.0),
        ),
        (REINFORCE, lambda logp, _, old, rows, a: -a * logp),
        (
            with_(REINFORCE, kl_coef=0.3, kl_estimator="k2"),
            lambda logp, _, old, rows, a: -a * logp + 0.3 * (logp - rows.ref_logp_BT) ** 2 / 2,
        ),
        (
            with_(REINFORCE, entropy_coef=0.3),
            lambda logp, entropy, old, rows, a: -a * logp - 0.3 * entropy,
        ),
        (
            with_(REINFORCE, importance="truncate", importance_high=1.1),
            lambda logp, _, old, rows, a: (
                -a * logp * jnp.minimum(jnp.exp(old - rows.sampler_logp_BT), 1.1)
            ),
        ),
        (
            with_(
                REINFORCE, importance="mask", importance_level="sequence",
                importance_low=0.2, importance_high=4.0, kl_coef=0.1,
            ),  # the weight is the surrogate's, not the penalty's
            lambda logp, _, old, rows, a: (
                -a * logp
                * losses.masked_importance_weight(
                    old, rows.sampler_logp_BT, rows.mask_BT, "sequence", 0.2, 4.0
                )
                + 0.1 * kl.k3(logp, rows.ref_logp_BT)
            ),
        ),
    ],
    ids=lambda x: getattr(x, "surrogate", ""),
)  # fmt: skip
def test_parts(o, loss_of):
    assert total_loss(o)[0] == by_hand(loss_of)


def test_lambda_weighs_rows_and_learns():
    o = with_(REINFORCE, aggregator="lambda_grpo", lambda_ratio=1 / 9)
    assert total_loss(o)[0] == total_loss(REINFORCE)[0]  # exponent 0
    weight = aggregators.length_weight(jnp.array([[6, 3, 1, 4]]), jnp.float32(2.0))[0][:, None]
    expected = by_hand(lambda logp, _, old, rows, a: -a * logp * weight)
    assert total_loss(o, exponent=2.0)[0] == expected
    logp, entropy, old, rows = case()

    def loss(exponent):
        return aggregate(o, token_loss(o, logp, entropy, old, rows, exponent)[0], rows.mask_BT)[0]

    slope = (loss(jnp.float32(0.01)) - loss(jnp.float32(-0.01))) / 0.02
    np.testing.assert_allclose(jax.grad(loss)(jnp.float32(0)), slope, rtol=1e-2)
    assert slope != 0


@pytest.mark.parametrize("name", choices.AGGREGATORS)
def test_aggregators_by_name(name):
    _, _, _, rows = case()
    o = Objective("reinforce", aggregator=name, constant_length=10)
    loss = jnp.ones((B, T))
    total, count = aggregate(o, loss, rows.mask_BT)
    expected = {
        "token_mean": 1,
        "lambda_grpo": 1,
        "sequence_mean_token_mean": 1,
        "sequence_mean_token_sum": 14 / 4,
        "constant_length": 14 / 40,
    }[name]
    assert float(total / count) == pytest.approx(expected)


@pytest.mark.parametrize(
    "o, expected",
    [  # ratios 1.5, 0.5 | 1.5, 0.5 with A = 1, -1; sequence ratios sqrt(0.75) = 0.866
        (Objective("ppo_clip", 0.2, 0.2), [[1, 0], [0, 1]]),
        (Objective("cispo", 0.2, 0.2), [[1, 1], [1, 1]]),
        (Objective("gspo", 0.1, 0.1), [[0, 0], [1, 1]]),
        (Objective("gmpo", 0.4, 0.4), [[1, 0], [0, 1]]),  # ln 1.5 = 0.405
        (Objective("gmpo", 0.7, 0.41), [[0, 0], [0, 0]]),  # ln 0.5 = -0.693
        (Objective("sapo"), [[0, 0], [0, 0]]),
        (Objective("reinforce"), [[0, 0], [0, 0]]),
    ],
)
def test_what_counts_as_clipped(o, expected):
    logp = jnp.log(jnp.array([[1.5, 0.5], [1.5, 0.5]]))
    out = clipped(o, logp, jnp.zeros((2, 2)), jnp.array([[1.0], [-1.0]]), jnp.ones((2, 2), bool))
    assert out.astype(int).tolist() == expected


def test_what_is_reported():
    o = with_(PPO, kl_coef=0.1, importance="truncate", importance_high=2.0)
    report = total_loss(o)[1]
    logp, _, old, rows = case()
    assert set(report) == {"entropy", "clip_fraction", "approx_kl", "kl", "importance_weight"}
    np.testing.assert_allclose(
        report["approx_kl"], jnp.where(rows.mask_BT, old - logp, 0).sum(), rtol=1e-5
    )
    np.testing.assert_allclose(
        report["kl"], jnp.where(rows.mask_BT, kl.k3(logp, rows.ref_logp_BT), 0).sum(), rtol=1e-5
    )


def test_from_the_config():
    c = config.default()
    c.algo.name, c.kl.coef, c.kl.place = "gspo", 0.5, "reward"
    o = make_objective(config.validate(c))
    assert (o.surrogate, o.clip_low, o.clip_high, o.dual_clip) == ("gspo", 3e-4, 4e-4, 0)
    assert (o.aggregator, o.kl_coef) == ("sequence_mean_token_mean", 0)
    assert o.constant_length == c.rollout.max_response
    c.kl.place = "loss"
    assert make_objective(c).kl_coef == 0.5
