import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_estimators import N, P, T, rollouts

from fgrpo_jax import sharding, weights
from fgrpo_jax.logprobs import response_logprobs
from fgrpo_jax.model import Policy
from fgrpo_jax.reference import make_reference

FOLDER = weights.EMBEDDED / "tiny_arithmetic"


@pytest.mark.parametrize("mesh, microbatch", [((1, 1, 1), 5), ((1, 2, 2), 4), ((2, 2, 2), 100)])
def test_it_is_the_log_probability_under_the_folder_s_weights(mesh, microbatch):
    policy = Policy(weights.model_config(FOLDER))
    devices = np.array(jax.devices()[: int(np.prod(mesh))]).reshape(mesh)
    mesh = jax.sharding.Mesh(devices, sharding.AXES)
    x = rollouts()
    x.tokens_BT[:] = np.random.RandomState(0).randint(0, 256, x.tokens_BT.shape)
    with jax.set_mesh(mesh):
        out = make_reference(policy, FOLDER, 0.7, 4, microbatch, mesh)(x)
        params = weights.load(FOLDER, policy, mesh)
        tokens = np.concatenate([np.repeat(x.prompts.tokens_PC, N, 0), x.tokens_BT], 1)
        start = jnp.ones(P * N, jnp.int32)  # prompts of one token in two columns
        expected, _ = response_logprobs(policy, params, jnp.asarray(tokens), start, T, 0.7, 512)
    assert out.ref_logp_BT is not None and out.ref_logp_BT.dtype == np.float32
    np.testing.assert_allclose(out.ref_logp_BT, expected, rtol=1e-4, atol=1e-4)
