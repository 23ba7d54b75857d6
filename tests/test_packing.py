import dataclasses
import functools

import jax
import numpy as np
import optax
import pytest

from fgrpo_jax import ragged, sharding
from fgrpo_jax.objective import Objective
from fgrpo_jax.packing import by_length, first_fit, pack, unpack
from fgrpo_jax.rollouts import put_batch
from fgrpo_jax.structs import LearnerBatch
from fgrpo_jax.update import (
    UpdateSettings,
    abstract_state,
    init_state,
    make_old_logprobs,
    make_update,
)

P, M, C, T = 8, 4, 5, 12  # prompts, responses of each
B = P * M
SCHEDULE = optax.constant_schedule(0.1)
OBJECTIVES = {
    "token_mean": Objective("ppo_clip", 0.2, 0.2),
    "kl, masked weights": Objective(
        "ppo_clip", 0.2, 0.2, kl_coef=0.1, importance="mask", importance_low=0.2
    ),
    "sequences": Objective("gspo", 0.2, 0.2, aggregator="sequence_mean_token_mean"),
    "lambda": Objective("ppo_clip", 0.2, 0.2, aggregator="lambda_grpo", entropy_coef=0.1),
}


def rows():
    """Responses of 0 to T tokens; rows of a prompt are adjacent."""
    random = np.random.RandomState(0)
    length = random.randint(0, T + 1, B)
    length[3], length[4:8] = T, 0  # a group without a token
    prompts = np.repeat(random.randint(8, 48, (P, C)), M, axis=0)
    tokens = np.concatenate([prompts, random.randint(8, 48, (B, T))], axis=1)
    own_first = [np.roll(length.reshape(P, M), -m, axis=1) for m in range(M)]
    logp = lambda: -np.abs(random.randn(B, T)).astype(np.float32)
    return LearnerBatch(
        tokens_BS=tokens.astype(np.int32),
        start_B=np.repeat(random.randint(0, C, P), M).astype(np.int32),
        mask_BT=np.arange(T)[None] < length[:, None],
        advantage_B=random.randn(B).astype(np.float32),
        sampler_logp_BT=logp(),
        ref_logp_BT=logp(),
        length_BN=np.stack(own_first, axis=1).reshape(B, M).astype(np.int32),
    )


def update(
    policy,
    params,
    objective,
    samples=1,
    columns=0,
    micro_rows=8,
    epochs=1,
    mesh=(1, 1, 1),
    widths=(),
    whole=False,
):
    """New params and metrics of two minibatches."""
    batch, optimizer = rows(), optax.chain(optax.sgd(SCHEDULE))
    devices = np.array(jax.devices()[: int(np.prod(mesh))]).reshape(mesh)
    mesh = jax.sharding.Mesh(devices, sharding.AXES)
    with jax.set_mesh(mesh):
        abstract = abstract_state(policy, optimizer, mesh)
        settings = UpdateSettings(objective, 0.8, epochs, 512, samples, widths)
        step = make_update(policy, optimizer, SCHEDULE, settings, abstract)
        micros = B // 2 // micro_rows
        if columns:
            batch = pack(batch, M, 2, micro_rows, columns, whole)
            micros = len(batch.part_Bs) // (2 * micro_rows)
            assert micros >= max(batch.used_Z)
        elif widths:
            batch = by_length(batch, M, samples, 2, micros, widths)
        state = init_state(params, optimizer, abstract)
        batch = put_batch(batch, 2, micros, mesh)
        batch = make_old_logprobs(policy, settings, mesh)(state.params, batch)
        assert batch.old_logp_BT.shape == batch.mask_BT.shape
        state, metrics = step(state, batch)
        return jax.device_get((state.params, state.exponent, metrics))


def same(ours, theirs):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6), ours[:2], theirs[:2]
    )
    for name in theirs[2].keys() - {"padding", "drift_max"}:
        np.testing.assert_allclose(ours[2][name], theirs[2][name], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_shared_prompts_and_packed_rows_give_the_same_update(policy, params, name):
    objective = OBJECTIVES[name]
    plain = update(policy, params, objective, epochs=2)
    same(update(policy, params, objective, samples=M, epochs=2), plain)
    packed = update(policy, params, objective, columns=T, micro_rows=2, epochs=2)
    same(packed, plain)
    assert packed[2]["padding"] < plain[2]["padding"]
    whole = update(policy, params, objective, columns=C + T, micro_rows=2, epochs=2, whole=True)
    same(whole, plain)
    assert whole[2]["padding"] < plain[2]["padding"]


@pytest.mark.parametrize(
    "columns, micro_rows, whole",
    [
        (T, 8, False),
        (T + 3, 4, False),
        (2 * T, 1, False),
        (4 * T, 3, False),
        (C + T, 8, True),
        (C + T + 3, 1, True),
        (3 * (C + T), 3, True),
    ],
)
def test_any_size_of_packed_rows(policy, params, columns, micro_rows, whole):
    run = functools.partial(update, policy, params, OBJECTIVES["token_mean"])
    same(run(columns=columns, micro_rows=micro_rows, whole=whole), run())


def test_the_kernel_s_packed_rows_give_the_same_update(policy, params, monkeypatch):
    monkeypatch.setattr(ragged, "INTERPRET", True)
    objective, kernel = OBJECTIVES["lambda"], ("splash", "xla")
    packed = functools.partial(update, columns=C + T, micro_rows=4, whole=True)
    policy = dataclasses.replace(policy, remat="attention")
    ours = packed(dataclasses.replace(policy, backends=kernel), params, objective)
    same(ours, update(policy, params, objective))


def test_eight_devices_pack_and_share(policy, params):
    objective = OBJECTIVES["sequences"]
    plain = update(policy, params, objective)
    same(update(policy, params, objective, samples=2, mesh=(1, 4, 2)), plain)
    same(update(policy, params, objective, columns=T, mesh=(1, 4, 2)), plain)
    same(update(policy, params, objective, columns=C + T, mesh=(1, 4, 2), whole=True), plain)


def test_first_fit_by_hand():
    # 7 opens a row, 5 a second that 4 fits in, and 3 fits behind 7
    assert first_fit(np.array([3, 7, 0, 4, 5]), 10, 4) == [[1, 0], [4, 3]]
    assert first_fit(np.array([3, 7, 0, 4, 5]), 10, 1) == [[1], [4], [3], [0]]
    assert first_fit(np.array([1, 1, 1, 9]), 10, 2) == [[3, 0], [1, 2]]
    assert first_fit(np.array([10, 10]), 10, 4) == [[0], [1]]
    assert first_fit(np.array([0, 0]), 10, 4) == []


def places(packed, whole):
    """(response slot, row, its part's columns, its response's), of those that hold a response."""
    for b in np.flatnonzero(packed.length_B):
        r, m = divmod(int(b), M)
        own = np.flatnonzero(packed.part_Bs[r] == m + 1)
        begin, size = packed.begin_B[b], packed.length_B[b]
        assert own.tolist() == list(range(own[0], begin + size))  # adjacent, the response last
        assert whole or own[0] == begin
        yield b, r, own, np.arange(begin, begin + size)


@pytest.mark.parametrize("columns, whole", [(T, False), (C + T, True), (3 * (C + T), True)])
def test_packed_rows_hold_every_token_once(columns, whole):
    batch = rows()
    packed = pack(batch, M, 2, 2, columns, whole)
    rows_a_minibatch = len(packed.part_Bs) // 2
    found = []
    for b, r, own, response in places(packed, whole):
        (source,) = np.flatnonzero(batch.advantage_B == packed.advantage_B[b])
        found.append(source)
        assert source // (B // 2) == r // rows_a_minibatch
        size = batch.mask_BT[source].sum()
        tokens = batch.tokens_BS[source, batch.start_B[source] : C + size].tolist()
        front = [] if whole else packed.tokens_BS[r, packed.start_B[r] : C].tolist()
        before = packed.tokens_BS.shape[1] - columns
        assert front + packed.tokens_BS[r, before + own].tolist() == tokens
        assert packed.mask_BT[r, response].all() and len(response) == size
        assert packed.sampler_logp_BT[r, response].tolist() == (
            batch.sampler_logp_BT[source, :size].tolist()
        )
        assert packed.length_BN[b].tolist() == batch.length_BN[source].tolist()
    assert sorted(found) == np.flatnonzero(batch.mask_BT.any(axis=1)).tolist()
    assert packed.mask_BT.sum() == batch.mask_BT.sum()
    empty = packed.length_B == 0
    assert not packed.advantage_B[empty].any() and not packed.begin_B[empty].any()
    if whole:
        assert not packed.start_B.any() and packed.tokens_BS.shape == packed.part_Bs.shape
    for z, used in enumerate(packed.used_Z):
        own = packed.part_Bs[z * rows_a_minibatch : (z + 1) * rows_a_minibatch]
        assert own[: used * 2].any(axis=1).sum() > (used - 1) * 2 and not own[used * 2 :].any()


@pytest.mark.parametrize("columns, whole", [(T, False), (C + T, True)])
def test_unpacking_is_the_way_back(columns, whole):
    batch = rows()
    packed = dataclasses.replace(pack(batch, M, 1, 2, columns, whole), used_Z=None)
    number = np.where(packed.mask_BT, np.arange(packed.mask_BT.size).reshape(-1, columns), -1)
    out, (numbers,) = jax.jit(unpack)(packed, number.astype(np.int32))
    out, numbers = jax.device_get((out, numbers))
    assert sorted(numbers[out.mask_BT]) == sorted(number[packed.mask_BT])
    theirs = {
        x: batch.sampler_logp_BT[i][batch.mask_BT[i]].tolist()
        for i, x in enumerate(batch.advantage_B)
    }
    for b in np.flatnonzero(out.length_B):
        ours = out.sampler_logp_BT[b][out.mask_BT[b]].tolist()
        assert ours == theirs[out.advantage_B[b]]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_microbatches_of_like_length_give_the_same_update(policy, params, name):
    plain = update(policy, params, OBJECTIVES[name], epochs=2)
    for shared in (2, M):
        ordered = update(
            policy, params, OBJECTIVES[name], shared, epochs=2, micro_rows=4, widths=(3, 6, T)
        )
        same(ordered, plain)


def test_devices_change_nothing_by_length(policy, params):
    mesh = (1, 2, 2)
    one, many = (
        update(policy, params, OBJECTIVES["token_mean"], M, mesh=m, widths=(4, 8, T))
        for m in ((1, 1, 1), mesh)
    )
    same(many, one)


def test_by_length_by_hand():
    """Two minibatches of two prompts with two responses; microbatches of two rows."""
    length = np.array([5, 1, 0, 2, 3, 3, 8, 0])
    batch = LearnerBatch(
        tokens_BS=np.arange(8)[:, None], start_B=np.arange(8),
        mask_BT=np.arange(8) < length[:, None], advantage_B=np.arange(8.0),
        sampler_logp_BT=np.zeros((8, 8)),
    )  # fmt: skip
    out = by_length(batch, 2, 2, 2, 2, (2, 4, 8))
    # of the first minibatch the second prompt is the shorter, and its first response
    np.testing.assert_array_equal(out.start_B, [2, 3, 1, 0, 4, 5, 7, 6])
    alone = by_length(batch, 2, 1, 2, 2, (2, 4, 8))  # each row for itself
    np.testing.assert_array_equal(alone.mask_BT.sum(axis=1), [0, 1, 2, 5, 0, 3, 3, 8])
    np.testing.assert_array_equal(alone.width_ZZ, [[0, 2], [1, 2]])
    np.testing.assert_array_equal(out.mask_BT.sum(axis=1), [0, 2, 1, 5, 3, 3, 0, 8])
    np.testing.assert_array_equal(out.width_ZZ, [[0, 2], [1, 2]])  # 2 and 5; 3 and 8 columns
    np.testing.assert_array_equal(out.tokens_BS[:, 0], out.start_B)


def test_padding_counts_the_columns_that_were_computed(policy, params):
    tokens = rows().mask_BT.reshape(2, -1).sum(axis=1)
    out = by_length(rows(), M, M, 2, 4, (3, 6, T))
    columns = np.array([3, 6, T])[out.width_ZZ].sum(axis=1) * 4  # rows of a microbatch
    _, _, metrics = update(
        policy, params, OBJECTIVES["token_mean"], M, micro_rows=4, widths=(3, 6, T)
    )
    np.testing.assert_allclose(metrics["padding"], (1 - tokens / columns).mean(), rtol=1e-5)
    assert columns.sum() < rows().mask_BT.size
