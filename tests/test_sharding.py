import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import tiny_config

from fgrpo_jax import UserError, sharding
from fgrpo_jax.model import Policy
from fgrpo_jax.update import abstract_state, init_state


def test_a_parameter_without_a_rule_raises():
    mesh = sharding.make_mesh(1, 8, 1)
    with pytest.raises(ValueError, match="layers/gate/weight .* has no rule in sharding.PARAMS"):
        sharding.state_shardings(mesh, {"layers": {"gate": {"weight": jnp.zeros((2, 3))}}})


def test_an_axis_that_does_not_divide_is_named():
    mesh = sharding.make_mesh(1, 8, 1)
    with pytest.raises(UserError, match=r"embed_tokens/weight .* 12 is not a multiple of"):
        sharding.state_shardings(mesh, {"embed_tokens": {"weight": jnp.zeros((12, 4))}})


def test_every_weight_is_shared_by_all_devices_but_norms_and_biases(params, policy):
    mesh = sharding.make_mesh(1, 4, 2)
    shardings = sharding.state_shardings(mesh, params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = sharding.path_name(path)
        here = shardings
        for key in path:
            here = here[key.key]
        parts = leaf.size // np.prod(here.shard_shape(leaf.shape))
        assert parts == (1 if "norm" in name else 2 if "bias" in name else 8), name


def test_a_torus_s_sides_are_cut_where_no_axis_is_their_product(monkeypatch):
    def make_mesh(*_, **__):
        raise NotImplementedError("Failed to find assignment for logical_axis_index 2")

    plain = sharding.make_mesh(1, 4, 2)
    monkeypatch.setattr(jax, "make_mesh", make_mesh)
    assert sharding.make_mesh(1, 4, 2, devices=jax.devices()) == plain


def test_decode_layout_is_shared_by_tp_alone(params):
    mesh = sharding.make_mesh(1, 4, 2)
    for s in jax.tree.leaves(sharding.state_shardings(mesh, params, "decode")):
        assert "fsdp" not in str(s.spec)


def test_optimizer_state_lies_as_its_weights():
    mesh = sharding.make_mesh(1, 4, 2)
    policy = Policy(tiny_config())
    params = policy.init(jax.random.key(0))
    optimizer = optax.chain(optax.clip(1.0), optax.adamw(1e-3))
    state = init_state(params, optimizer, abstract_state(policy, optimizer, mesh))
    weights = jax.tree.leaves(jax.tree.map(lambda x: x.sharding, state.params))
    moments = optax.tree.get_all_with_path(state.opt_state, "mu") + optax.tree.get_all_with_path(
        state.opt_state, "nu"
    )
    assert len(moments) == 2
    for _, moment in moments:
        assert jax.tree.leaves(jax.tree.map(lambda x: x.sharding, moment)) == weights


def test_constrain_without_a_mesh_is_nothing():
    x = jnp.ones((2, 3))
    assert sharding.constrain(x, "BT") is x and sharding.constrain_state(x) is x
