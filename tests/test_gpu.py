"""bfloat16, on a GPU with cuDNN's attention: what is sampled is what is trained on, and an update
is that of float32. With XLA's attention the same holds on every machine.

cuDNN's attention itself is in test_attention.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import tiny_config

from fgrpo_jax import sharding
from fgrpo_jax.layout import SamplerSettings
from fgrpo_jax.logprobs import response_logprobs
from fgrpo_jax.model import Policy
from fgrpo_jax.objective import Objective
from fgrpo_jax.rollouts import put_batch
from fgrpo_jax.sampler import gather, make_sampler
from fgrpo_jax.sampling import Sampling
from fgrpo_jax.structs import LearnerBatch, Prompts
from fgrpo_jax.update import UpdateSettings, abstract_state, init_state, make_update

ATTENTION = [pytest.param("cudnn", marks=pytest.mark.gpu), "xla"]
CONFIG = tiny_config(
    vocab=512, width=256, layers=4, heads=14, kv_heads=2, head_size=64, feed_forward=512
)  # grouped queries of Qwen2.5-0.5B
P, N, C, T = 8, 4, 24, 40
SCHEDULE = optax.constant_schedule(1.0)


@pytest.fixture(scope="module")
def weights():
    """Scaled so that distributions are far from flat; norms stay 1."""
    init = Policy(CONFIG).init(jax.random.key(0))
    return jax.tree.map(lambda x: jnp.where(x == 1, x, x * 3), init)


@pytest.fixture(scope="module")
def prompts():
    random = np.random.default_rng(0)
    length = random.integers(1, C + 1, P).astype(np.int32)
    tokens = random.integers(8, 512, (P, C)).astype(np.int32)
    tokens[np.arange(C)[None] < C - length[:, None]] = 0
    return Prompts(tokens, length, np.arange(P, dtype=np.int32), ())


@pytest.mark.parametrize("attention", ATTENTION)
def test_samples_are_of_the_trained_distribution(attention, weights, prompts):
    """Decoding and whole rows round differently, by a hundredth of a nat a token."""
    policy = Policy(CONFIG, jnp.bfloat16, backends=(attention, "xla"))
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), weights)
    settings = SamplerSettings(N, T, Sampling(), (0,), slots=12, chunk=8)
    key = jax.random.key(1, impl="threefry2x32")
    out = gather(make_sampler(policy, settings)(params, prompts, key), P * N, settings)
    rows = np.concatenate([np.repeat(prompts.tokens_PC, N, axis=0), out.tokens_BT], axis=1)
    start = np.repeat(C - prompts.length_P, N)
    trained = jax.jit(
        lambda params, rows, start: response_logprobs(
            policy, params, rows, start, T, 1.0, 512, samples=N
        )[0]
    )(params, jnp.asarray(rows), jnp.asarray(start))
    drift = np.abs(np.asarray(trained) - out.logp_BT)[out.mask_BT]
    assert out.mask_BT.sum() > P * N * T / 2 and -out.logp_BT[out.mask_BT].mean() > 0.5
    assert drift.mean() < 0.03 and drift.max() < 0.3


@pytest.mark.parametrize("attention", ATTENTION)
def test_an_update_is_that_of_float32(attention, weights, prompts):
    random = np.random.default_rng(2)
    length = random.integers(1, T + 1, P * N)
    batch = LearnerBatch(
        tokens_BS=np.concatenate(
            [np.repeat(prompts.tokens_PC, N, axis=0), random.integers(8, 512, (P * N, T))], axis=1
        ).astype(np.int32),
        start_B=np.repeat(C - prompts.length_P, N).astype(np.int32),
        mask_BT=np.arange(T)[None] < length[:, None],
        advantage_B=random.normal(size=P * N).astype(np.float32),
        sampler_logp_BT=np.zeros((P * N, T), np.float32),
    )
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1, 1), sharding.AXES)
    optimizer = optax.sgd(SCHEDULE)  # whose step is the gradient

    def run(dtype, attention):
        policy = Policy(CONFIG, dtype, remat="full", backends=(attention, "xla"))
        how = UpdateSettings(Objective("reinforce"), 1.0, 1, 16, N)
        with jax.set_mesh(mesh):
            abstract = abstract_state(policy, optimizer, mesh)
            state = init_state(weights, optimizer, abstract)
            update = make_update(policy, optimizer, SCHEDULE, how, abstract)
            state, metrics = update(state, put_batch(batch, 1, 2, mesh))
        new, metrics = jax.device_get((state.params, metrics))
        step = jax.tree.map(lambda x, y: x - np.asarray(y), new, weights)
        return np.concatenate([x.ravel() for x in jax.tree.leaves(step)]), metrics

    (exact, expected), (step, metrics) = run(jnp.float32, "xla"), run(jnp.bfloat16, attention)
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=0.02, atol=0.01)
    np.testing.assert_allclose(metrics["grad_norm"], expected["grad_norm"], rtol=0.05)
    cosine = exact @ step / np.linalg.norm(exact) / np.linalg.norm(step)
    assert cosine > 0.995
