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


@pytest.mark.parametrize(
    "mesh, microbatch, offload",
    [((1, 1, 1), 5, False), ((1, 2, 2), 4, False), ((2, 2, 2), 100, False), ((1, 2, 2), 4, True)],
)
def test_it_is_the_log_probability_under_its_weights(mesh, microbatch, offload):
    policy = Policy(weights.model_config(FOLDER))
    devices = np.array(jax.devices()[: int(np.prod(mesh))]).reshape(mesh)
    mesh = jax.sharding.Mesh(devices, sharding.AXES)
    x = rollouts()
    x.tokens_BT[:] = np.random.RandomState(0).randint(0, 256, x.tokens_BT.shape)
    with jax.set_mesh(mesh):
        own = weights.load(FOLDER, policy, mesh)
        reference = make_reference(policy, own, 0.7, 4, microbatch, mesh, offload)
        if offload:
            assert all(leaf.is_deleted() for leaf in jax.tree.leaves(own)), "they take memory yet"
            reference(x)  # they come back each time
        out = reference(x)
        params = weights.load(FOLDER, policy, mesh)
        tokens = np.concatenate([np.repeat(x.prompts.tokens_PC, N, 0), x.tokens_BT], 1)
        start = jnp.ones(P * N, jnp.int32)  # prompts of one token in two columns
        expected, _ = response_logprobs(policy, params, jnp.asarray(tokens), start, T, 0.7, 512)
    assert out.ref_logp_BT is not None and out.ref_logp_BT.dtype == np.float32
    np.testing.assert_allclose(out.ref_logp_BT, expected, rtol=1e-4, atol=1e-4)
