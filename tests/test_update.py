import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fgrpo_jax import aggregators, choices, losses, sharding
from fgrpo_jax.logprobs import response_logprobs
from fgrpo_jax.objective import Objective
from fgrpo_jax.rollouts import put_batch
from fgrpo_jax.structs import LearnerBatch
from fgrpo_jax.update import (
    UpdateSettings,
    abstract_state,
    init_state,
    make_old_logprobs,
    make_update,
)

B, C, T = 16, 4, 6
SCHEDULE = optax.constant_schedule(1e-3)


def settings(epochs=1, surrogate="ppo_clip", **changes):
    bounds = choices.ALGORITHMS[{"ppo_clip": "grpo"}.get(surrogate, surrogate)]
    fields = dict(zip(("clip_low", "clip_high", "dual_clip"), bounds[1:4], strict=True))
    objective = Objective(surrogate, **(fields | changes))
    return UpdateSettings(objective, temperature=0.8, epochs=epochs, logit_chunk=512)


def rows(seed=0):
    random = np.random.RandomState(seed)
    length = random.randint(1, T + 1, B)
    return LearnerBatch(
        tokens_BS=random.randint(8, 48, (B, C + T)).astype(np.int32),
        start_B=random.randint(0, C, B).astype(np.int32),
        mask_BT=np.arange(T)[None] < length[:, None],
        advantage_B=random.randn(B).astype(np.float32),
        sampler_logp_BT=-np.abs(random.randn(B, T)).astype(np.float32),
    )


def start(policy, params, optimizer, mesh, **changes):
    """The state before the first step, and the update that takes it."""
    abstract = abstract_state(policy, optimizer, mesh)
    update = make_update(policy, optimizer, SCHEDULE, settings(**changes), abstract)
    return init_state(params, optimizer, abstract), update


def run(policy, params, batch, minis=1, micros=1, mesh=(1, 1, 1), steps=1, **changes):
    """New params, and the metrics of the last step. One device unless the mesh says more."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(SCHEDULE, eps=1e-3))
    devices = np.array(jax.devices()[: int(np.prod(mesh))]).reshape(mesh)
    mesh = jax.sharding.Mesh(devices, sharding.AXES)
    with jax.set_mesh(mesh):
        state, update = start(policy, params, optimizer, mesh, **changes)
        old_logprobs = make_old_logprobs(policy, settings(**changes), mesh)
        for _ in range(steps):
            placed = put_batch(batch, minis, micros, mesh)
            state, metrics = update(state, old_logprobs(state.params, placed))
    return jax.device_get((state, metrics))


def same(a, b, rtol=2e-5, atol=2e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b)


def test_against_the_loss_written_out(policy, params):
    batch = rows()
    state, metrics = run(policy, params, batch)

    def loss(params):
        logp, _ = response_logprobs(
            policy, params, jnp.asarray(batch.tokens_BS), jnp.asarray(batch.start_B), T, 0.8, 512
        )
        surrogate = losses.ppo_clip(
            logp, jax.lax.stop_gradient(logp), jnp.asarray(batch.advantage_B)[:, None]
        )
        return jnp.where(batch.mask_BT, surrogate, 0).sum() / float(batch.mask_BT.sum())

    value, grads = jax.value_and_grad(loss)(params)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(SCHEDULE, eps=1e-3))
    with jax.numpy_dtype_promotion("standard"):  # optax's own arithmetic needs it
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
    same(state.params, optax.apply_updates(params, updates))
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(grads), rtol=1e-5)
    assert state.step == 1


@pytest.mark.parametrize("micros", [2, 4, 16])
def test_microbatches_change_nothing(policy, params, micros):
    one, many = (run(policy, params, rows(), micros=m, minis=1) for m in (1, micros))
    same(one, many)


@pytest.mark.parametrize("mesh", [(1, 8, 1), (1, 4, 2), (2, 2, 2), (1, 2, 2)])
@pytest.mark.parametrize("surrogate", ["ppo_clip", "cispo"])
def test_devices_change_nothing(policy, params, mesh, surrogate):
    one = run(policy, params, rows(), minis=2, surrogate=surrogate)
    many = run(policy, params, rows(), minis=2, mesh=mesh, surrogate=surrogate)
    same(one, many, rtol=5e-5, atol=5e-6)


OBJECTIVES = {
    "sequences": dict(aggregator="sequence_mean_token_mean"),
    "sums": dict(aggregator="sequence_mean_token_sum"),
    "constant": dict(aggregator="constant_length", constant_length=T),
    "lambda": dict(aggregator="lambda_grpo", lambda_lr=0.1),
    "kl and entropy": dict(kl_coef=0.5, entropy_coef=0.5),
    "drift": dict(importance="truncate", importance_level="sequence"),
    "gspo_token": dict(surrogate="gspo_token"),
}


def full_rows():
    """Rows with all that an objective may read; a masked row among them."""
    batch, random = rows(), np.random.RandomState(9)
    batch.mask_BT[3] = False
    length = np.asarray(batch.mask_BT).sum(1).reshape(-1, 4)
    own_first = np.stack([np.roll(length, -n, axis=1) for n in range(4)], 1).reshape(B, 4)
    return batch.replace(
        ref_logp_BT=-np.abs(random.randn(B, T)).astype(np.float32),
        length_BN=own_first.astype(np.int32),
    )


@pytest.mark.parametrize("name", OBJECTIVES)
def test_no_objective_depends_on_the_split(policy, params, name):
    run_ = lambda **kwargs: run(policy, params, full_rows(), minis=2, **OBJECTIVES[name], **kwargs)
    state, metrics = run_()
    same((state, metrics), run_(micros=8))
    if name in ("lambda", "kl and entropy"):
        same((state, metrics), run_(micros=2, mesh=(1, 2, 2)), rtol=5e-5, atol=5e-6)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((state, metrics)))
    if name == "lambda":
        assert state.exponent != 0 and metrics["lambda"] != 0  # the mean of 0 and the first step
    else:
        assert state.exponent == 0


def test_the_entropy_bonus_raises_the_entropy(policy, params):
    batch = rows().replace(advantage_B=np.zeros(B, np.float32))
    (_, first), (_, last) = (
        run(policy, params, batch, steps=steps, entropy_coef=1.0) for steps in (1, 20)
    )
    assert last["entropy"] > first["entropy"] + 0.01


def test_the_kl_penalty_pulls_towards_the_reference(policy, params):
    batch = rows().replace(advantage_B=np.zeros(B, np.float32))
    other = jax.tree.map(lambda x: x * 1.1, params)
    ref, _ = response_logprobs(
        policy, other, jnp.asarray(batch.tokens_BS), jnp.asarray(batch.start_B), T, 0.8, 512
    )
    batch = batch.replace(ref_logp_BT=np.asarray(ref))
    (_, first), (_, last) = (
        run(policy, params, batch, steps=steps, kl_coef=1.0, kl_estimator="k2") for steps in (1, 20)
    )
    assert 0 < last["kl"] < 0.9 * first["kl"]


def test_several_minibatches_are_several_optimizer_updates(policy, params):
    batch = rows()
    halves = [jax.tree.map(lambda x, h=h: x[h * 8 : h * 8 + 8], batch) for h in (0, 1)]
    state, _ = run(policy, params, batch, minis=2)
    # by hand: the second half's old log-probabilities are those of the first parameters
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(SCHEDULE, eps=1e-3))
    p, opt_state = params, optimizer.init(params)

    def logprobs(p, half):
        tokens, start = jnp.asarray(half.tokens_BS), jnp.asarray(half.start_B)
        return response_logprobs(policy, p, tokens, start, T, 0.8, 512)[0]

    for half in halves:
        old = logprobs(params, half)

        def loss(p, half=half, old=old):
            advantage = jnp.asarray(half.advantage_B)[:, None]
            total, count = aggregators.token_mean(
                losses.ppo_clip(logprobs(p, half), old, advantage), jnp.asarray(half.mask_BT)
            )
            return total / count

        grads = jax.grad(loss)(p)
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = optimizer.update(grads, opt_state, p)
        p = optax.apply_updates(p, updates)
    same(state.params, p)


def test_epochs_repeat_the_batch(policy, params):
    state, metrics = run(policy, params, rows(), epochs=3)
    counts = optax.tree.get_all_with_path(state.opt_state, "count")
    assert all(count == 3 for _, count in counts) and state.step == 1
    assert metrics["approx_kl"] != 0  # the policy moved away from the one that sampled


def test_old_logprobs_are_there_where_the_policy_will_move(policy, params):
    mesh = sharding.make_mesh(1, 4, 2)
    with jax.set_mesh(mesh):
        one, two = (put_batch(rows(), minis, 1, mesh) for minis in (1, 2))
        old_logprobs = make_old_logprobs(policy, settings(), mesh)
        assert old_logprobs(params, one) is one
        filled = old_logprobs(params, two)
        state, update = start(policy, params, optax.adamw(SCHEDULE), mesh)
        with pytest.raises(ValueError, match="need old_logp_BT: call old_logprobs first"):
            update(state, two)
    batch = rows()
    tokens, begin = jnp.asarray(batch.tokens_BS), jnp.asarray(batch.start_B)
    expected, _ = response_logprobs(policy, params, tokens, begin, T, 0.8, 512)
    assert filled.old_logp_BT.dtype == jnp.float32
    assert filled.old_logp_BT.sharding == two.sampler_logp_BT.sharding
    np.testing.assert_allclose(
        np.asarray(filled.old_logp_BT).reshape(B, T), expected, rtol=2e-5, atol=2e-6
    )


def test_all_masked_rows_give_no_nan(policy, params):
    batch = rows()
    batch = batch.replace(mask_BT=np.zeros_like(batch.mask_BT))
    state, metrics = run(policy, params, batch)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((state, metrics)))
    assert metrics["loss"] == 0 and metrics["grad_norm"] == 0


def test_masked_values_move_nothing(policy, params):
    batch = rows()
    hidden = np.concatenate([np.zeros((B, C), bool), ~batch.mask_BT], axis=1)
    other = batch.replace(
        tokens_BS=np.where(hidden, 9, batch.tokens_BS).astype(np.int32),
        sampler_logp_BT=np.where(batch.mask_BT, batch.sampler_logp_BT, -77).astype(np.float32),
    )
    same(run(policy, params, batch), run(policy, params, other), rtol=1e-6, atol=1e-7)


def test_zero_advantage_moves_only_by_weight_decay(policy, params):
    batch = rows()
    _, metrics = run(policy, params, batch.replace(advantage_B=np.zeros(B, np.float32)))
    assert metrics["grad_norm"] == 0


def test_learning_raises_the_likelihood_of_what_was_rewarded(policy, params):
    batch = rows()
    batch = batch.replace(advantage_B=np.ones(B, np.float32))
    _, first = run(policy, params, batch, surrogate="reinforce")
    _, last = run(policy, params, batch, surrogate="reinforce", steps=30)
    assert last["loss"] < 0.9 * first["loss"]


def test_drift_is_measured_on_real_tokens(policy, params):
    batch = rows()
    logp, _ = response_logprobs(
        policy, params, jnp.asarray(batch.tokens_BS), jnp.asarray(batch.start_B), T, 0.8, 512
    )
    exact = batch.replace(sampler_logp_BT=np.asarray(logp))
    assert run(policy, params, exact)[1]["drift_max"] < 1e-5
    shifted = exact.replace(sampler_logp_BT=np.asarray(logp) - 0.5)
    _, metrics = run(policy, params, shifted, micros=2)
    np.testing.assert_allclose(metrics["drift_mean"], 0.5, rtol=1e-4)
    np.testing.assert_allclose(metrics["drift_max"], 0.5, rtol=1e-4)


def poisoned(at, value=np.nan):
    """Rows of two minibatches, of which one has an advantage that no update survives."""
    batch = rows()
    advantage_B = batch.advantage_B.copy()
    advantage_B[at * B // 2] = value
    length = np.maximum(batch.mask_BT.sum(axis=1), 2)
    return dataclasses.replace(
        batch, advantage_B=advantage_B, mask_BT=np.arange(T)[None] < length[:, None]
    )


def test_an_update_that_is_not_finite_changes_nothing(policy, params):
    """The step then equals one that has the other minibatch alone."""
    good = jax.tree.map(lambda x: x[: B // 2], poisoned(1))
    alone, _ = run(policy, params, good)
    state, metrics = run(policy, params, poisoned(1), minis=2)
    assert metrics["skipped"] == metrics["skipped/not_finite"] == 1
    same(state.params, alone.params)
    same(state.opt_state, alone.opt_state)
    assert state.typical_norm == pytest.approx(alone.typical_norm, rel=1e-5)
    assert np.isnan(metrics["loss"]) and state.step == 1


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_step_of_nothing_finite_leaves_all_as_it_was(policy, params, value):
    state, metrics = run(policy, params, poisoned(0, value))
    assert metrics["skipped"] == 1 and state.step == 1 and state.typical_norm == 0
    jax.tree.map(np.testing.assert_array_equal, state.params, jax.device_get(params))
    assert all((np.asarray(x) == 0).all() for x in jax.tree.leaves(state.opt_state))


def guarded(policy, params, scales, **bounds):
    """Metrics and state of steps on the same rows, with advantages times the scales."""
    optimizer = optax.adamw(SCHEDULE, eps=1e-3)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), sharding.AXES)
    told = []
    with jax.set_mesh(mesh):
        abstract = abstract_state(policy, optimizer, mesh)
        limits = dataclasses.replace(settings(), **bounds)
        update = make_update(policy, optimizer, SCHEDULE, limits, abstract)
        state = init_state(params, optimizer, abstract)
        for scale in scales:
            batch = rows()
            batch = dataclasses.replace(batch, advantage_B=batch.advantage_B * np.float32(scale))
            before = jax.device_get(state)
            state, metrics = update(state, put_batch(batch, 1, 1, mesh))
            told.append((before, jax.device_get(metrics), jax.device_get(state)))
    return told


def test_a_spike_is_skipped_once_norms_are_known(policy, params):
    scales = [1.0, 50.0, *[1.0] * 10, 2.5, 50.0, 1.0]
    told = guarded(policy, params, scales, spike=4.0)
    skipped = [int(metrics["skipped/spike"]) for _, metrics, _ in told]
    assert skipped == [0] * 13 + [1, 0]  # the second came before ten norms were known
    before, _, after = told[13]
    jax.tree.map(np.testing.assert_array_equal, before.params, after.params)
    jax.tree.map(np.testing.assert_array_equal, before.opt_state, after.opt_state)
    typical = 0.0
    for _, metrics, after in told:
        norm = float(metrics["grad_norm"])
        level = min(norm, 4 * typical) if metrics["skipped"] else norm
        typical = 0.95 * typical + 0.05 * level if typical else norm
        assert after.typical_norm == pytest.approx(typical, rel=1e-5)


def test_norms_that_stay_high_become_typical(policy, params):
    """A spike that lasts is no spike; what taught nothing leaves the typical norm as it was."""
    scales = [*[1.0] * 10, *[0.0] * 5, *[8.0] * 20]
    told = guarded(policy, params, scales, spike=4.0)
    skipped = [int(metrics["skipped/spike"]) for _, metrics, _ in told]
    assert sum(skipped[:15]) == 0 and 1 <= sum(skipped[15:]) < 15 and not any(skipped[-5:])
    assert told[9][2].typical_norm == told[14][2].typical_norm


def test_drift_beyond_its_bound_is_skipped(policy, params):
    (_, metrics, _), *_ = guarded(policy, params, [1.0])
    drift = float(metrics["drift_mean"])
    assert "skipped/drift" not in metrics and drift > 0
    for bound, skipped in ((drift * 1.01, 0), (drift * 0.99, 1)):
        ((_, metrics, after),) = guarded(policy, params, [1.0], drift=bound)
        assert metrics["skipped/drift"] == metrics["skipped"] == skipped
        assert (after.typical_norm == 0) == bool(skipped)


def test_compiles_once(policy, params):
    mesh = sharding.make_mesh(1, 4, 2)
    with jax.set_mesh(mesh):
        state, update = start(policy, params, optax.adamw(SCHEDULE), mesh)
        for seed in range(3):
            state, _ = update(state, put_batch(rows(seed), 1, 1, mesh))
        assert update._cache_size() == 1


def test_the_state_is_donated(policy, params):
    mesh = sharding.make_mesh(1, 8, 1)
    with jax.set_mesh(mesh):
        state, update = start(policy, params, optax.adamw(SCHEDULE), mesh)
        update(state, put_batch(rows(), 1, 1, mesh))
    assert all(x.is_deleted() for x in jax.tree.leaves(state.params))
