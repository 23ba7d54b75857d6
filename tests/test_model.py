import importlib.util
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwen2_folder
from conftest import DATA, tiny_config

from fgrpo_jax import UserError, sharding, weights
from fgrpo_jax.model import MASKED, REMAT, Cache, Policy
from fgrpo_jax.model_config import ModelConfig, RopeScaling

GOLDEN = np.load(DATA / "golden_logits.npz")
TORCH = importlib.util.find_spec("torch") is not None


def our_logits(folder, ids, start):
    policy = Policy(weights.model_config(folder))
    params = weights.load(folder, policy, sharding.make_mesh(1, 8, 1))
    hidden = policy.hidden(params, jnp.asarray(ids, jnp.int32), jnp.asarray(start, jnp.int32))
    return np.asarray(policy.logits(params, hidden, 1.0))


def close(ours, theirs, start):
    for row, first in enumerate(start):
        np.testing.assert_allclose(ours[row, first:], theirs[row, first:], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("variant", qwen2_folder.VARIANTS)
def test_logits_equal_transformers(variant, tmp_path):
    config = qwen2_folder.hf_config(**qwen2_folder.VARIANTS[variant])
    ids, start = qwen2_folder.tokens()
    # widths that divide by eight devices
    ours = our_logits(qwen2_folder.write(tmp_path, config), ids, start)
    close(ours, GOLDEN[variant], start)
    if TORCH:
        close(ours, qwen2_folder.torch_logits(tmp_path, ids, start), start)


def test_left_padding_changes_nothing(policy, params):
    ids = jax.random.randint(jax.random.key(1), (3, 7), 0, 48)
    plain = policy.hidden(params, ids, jnp.zeros(3, jnp.int32))
    padded = jnp.concatenate([jnp.full((3, 5), 11), ids], axis=1)
    shifted = policy.hidden(params, padded, jnp.full(3, 5))
    np.testing.assert_allclose(shifted[:, 5:], plain, rtol=1e-5, atol=1e-5)
    other = padded.at[:, :5].set(23)  # what stands in the padding does not matter either
    np.testing.assert_array_equal(
        policy.hidden(params, other, jnp.full(3, 5))[:, 5:], shifted[:, 5:]
    )


def test_a_row_of_padding_alone_is_finite(policy, params):
    hidden = policy.hidden(params, jnp.zeros((1, 4), jnp.int32), jnp.full(1, 4))
    assert np.isfinite(hidden).all()


def test_decode_equals_the_full_forward(policy, params):
    ids = jax.random.randint(jax.random.key(2), (2, 9), 0, 48)
    start = jnp.array([0, 2])
    full = policy.hidden(params, ids, start)
    hidden, cache = policy.prefill(params, ids[:, :4], start)
    np.testing.assert_allclose(hidden, full[:, 3], rtol=1e-5, atol=1e-5)
    cache = jax.tree.map(lambda x: jnp.pad(x, [(0, 0)] * 3 + [(0, 5), (0, 0)]), cache)
    for column in range(4, 9):
        width = None if column % 2 else column  # all columns are read, or just those before
        args = (params, ids[:, column], start, jnp.int32(column), cache, width)
        hidden, cache = policy.decode(*args)
        np.testing.assert_allclose(hidden, full[:, column], rtol=1e-5, atol=1e-5)


def test_decode_of_other_families_equals_the_full_forward():
    """Queries and keys normalised, no bias, stretched wavelengths: of Qwen3 and Llama at once."""
    scaling = RopeScaling(factor=4.0, low=1.0, high=4.0, context=16)
    policy = Policy(tiny_config(bias=False, qk_norm=True, rope_theta=50.0, rope_scaling=scaling))
    params = jax.tree.map(
        lambda x: x * 8 if x.ndim > 2 else x + 0.3, policy.init(jax.random.key(0))
    )
    ids, start = jax.random.randint(jax.random.key(2), (2, 6), 0, 48), jnp.array([0, 2])
    full = policy.hidden(params, ids, start)
    _, cache = policy.prefill(params, ids[:, :5], start)
    cache = jax.tree.map(lambda x: jnp.pad(x, [(0, 0)] * 3 + [(0, 1), (0, 0)]), cache)
    hidden, _ = policy.decode(params, ids[:, 5], start, jnp.int32(5), cache)
    np.testing.assert_allclose(hidden, full[:, 5], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pieces", [(4, 9), (1, 2, 9), (8, 9)])
def test_prefill_in_pieces(policy, params, pieces):
    ids = jax.random.randint(jax.random.key(2), (3, 9), 0, 48)
    start = jnp.array([0, 2, 6])
    hidden, cache = policy.prefill(params, ids, start)
    so_far, begin = None, 0
    for end in pieces:
        last, new = policy.prefill(params, ids[:, begin:end], start, so_far)
        join = lambda *x: jnp.concatenate(x, axis=3)
        so_far, begin = jax.tree.map(join, so_far, new) if so_far else new, end
    np.testing.assert_allclose(last, hidden, rtol=1e-5, atol=1e-5)
    real = np.asarray(start)[None, :, None, None, None] <= np.arange(9)[None, None, None, :, None]
    for a, b in zip(jax.tree.leaves(so_far), jax.tree.leaves(cache), strict=True):
        np.testing.assert_allclose(np.where(real, a, 0), np.where(real, b, 0), atol=1e-5)


def test_blocks_of_layers_follow_each_other(policy, params):
    """However the layers are cut into blocks, the policy is the same."""
    ids = jax.random.randint(jax.random.key(2), (2, 5), 0, 48)
    start = jnp.array([0, 2])
    blocks = tuple(jax.tree.map(lambda x, i=i: x[i : i + 1], params["layers"]) for i in range(2))
    cut = params | {"layers": blocks}
    np.testing.assert_allclose(
        policy.hidden(cut, ids, start), policy.hidden(params, ids, start), rtol=1e-5, atol=1e-5
    )
    _, cache = policy.prefill(cut, ids, start)
    assert [x.shape[0] for x in cache.k_LBKSH] == [1, 1]


def test_unwritten_cache_is_never_read(policy, params):
    ids = jnp.array([[5, 6, 7]])
    start = jnp.zeros(1, jnp.int32)
    _, cache = policy.prefill(params, ids, start)
    outs = []
    for filler in (0.0, 1e3):
        room = jax.tree.map(
            lambda x, f=filler: jnp.pad(x, [(0, 0)] * 3 + [(0, 4), (0, 0)], constant_values=f),
            cache,
        )
        outs.append(policy.decode(params, jnp.array([9]), start, jnp.int32(3), room)[0])
    np.testing.assert_array_equal(*outs)


def test_gradient_of_remat_is_the_same(params):
    ids = jax.random.randint(jax.random.key(3), (2, 6), 0, 48)

    def loss(params, remat):
        return Policy(tiny_config(), remat=remat).hidden(params, ids, jnp.zeros(2, jnp.int32)).sum()

    plain, *others = (jax.jit(jax.grad(loss), static_argnums=1)(params, kind) for kind in REMAT)
    for other in others:
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), plain, other
        )


def test_remat_keeps_what_its_name_says(params):
    """Numbers kept for the backward pass, of 2 layers, B = 2 rows of 6 columns."""
    from jax._src.ad_checkpoint import saved_residuals

    ids = jax.random.randint(jax.random.key(3), (2, 6), 0, 48)

    def kept(remat):
        policy = Policy(tiny_config(), remat=remat)
        loss = lambda params: policy.hidden(params, ids, jnp.zeros(2, jnp.int32)).sum()
        found = [x for x, origin in saved_residuals(loss, params) if "argument" not in origin]
        stacked = [x for x in found if x.ndim > 2 and x.shape[:2] == (2, 2)]  # [L, B, T, ...]
        return sorted(math.prod(x.shape[3:]) for x in stacked)

    D, F, QH, KH = 32, 64, 32, 16
    assert kept("full") == [D]  # a layer's input
    assert kept("attention") == [D, QH]
    # a layer's input, q, k, v, o_proj's and gate's and up's; down_proj's is in the next one's input
    assert kept("dots") == sorted([D, QH, KH, KH, D, F, F])
    assert len(kept("none")) > 8


@pytest.mark.parametrize("mesh", [(1, 1, 2), (1, 2, 2)])
def test_columns_shared_between_layers_change_nothing(params, mesh):
    """On two and four devices: eight of one CPU would wait for each other."""
    ids = jax.random.randint(jax.random.key(3), (4, 6), 0, 48)
    start_B = jnp.array([0, 2, 1, 3])

    def loss(params, policy):
        shared = policy.response_hidden(params, ids[:2, :3], start_B[:2], ids[:, 3:])
        return (policy.hidden(params, ids, start_B)[2:, -1] ** 2).sum() + (shared**3).sum()

    gradient = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    plain = gradient(params, Policy(tiny_config()))
    devices = np.array(jax.devices()[: int(np.prod(mesh))]).reshape(mesh)
    with jax.set_mesh(jax.sharding.Mesh(devices, sharding.AXES)):
        shared = Policy(tiny_config(), share_columns=True)
        assert shared._stream(6) == "BtD" and shared._stream(1) == "BTD"
        found = gradient(params, shared)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4), plain, found)


def test_rows_that_the_tokenizer_does_not_know_are_masked(params):
    policy = Policy(tiny_config(), tokens=40)
    logits = policy.logits(params, jnp.ones((1, 32)), 1.0)
    assert (np.asarray(logits)[:, 40:] == MASKED).all() and (
        np.asarray(logits)[:, :40] > -100
    ).all()


def test_bfloat16_is_near(policy, params):
    ids = jax.random.randint(jax.random.key(4), (2, 6), 0, 48)
    start = jnp.zeros(2, jnp.int32)
    half = Policy(tiny_config(), jnp.bfloat16)
    hidden = half.hidden(params, ids, start)
    assert hidden.dtype == jnp.bfloat16 and half.logits(params, hidden, 1.0).dtype == jnp.float32
    np.testing.assert_allclose(
        hidden.astype(jnp.float32), policy.hidden(params, ids, start), atol=0.1
    )


def test_cache_is_written_only_at_its_column(policy, params):
    zeros = jnp.zeros((2, 1, 2, 6, 8))
    _, cache = policy.decode(
        params, jnp.array([3]), jnp.zeros(1, jnp.int32), jnp.int32(2), Cache((zeros,), (zeros,))
    )
    written = np.abs(np.asarray(cache.k_LBKSH[0])).sum((0, 1, 2, 4))
    assert (written > 0).tolist() == [False, False, True, False, False, False]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model_type": "gemma"}, "model_type 'gemma': it must be one of qwen2, qwen3, llama"),
        ({"model_type": "llama", "mlp_bias": True}, "mlp_bias true: it is not supported"),
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias true"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "low_freq_factor None: it must be a number above 0",
        ),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_scaling": {"type": "yarn"}}, "RoPE"),
        ({"hidden_size": None}, "has no hidden_size"),
    ],
)
def test_what_is_not_computed_is_refused(change, message):
    config = qwen2_folder.hf_config(**change)
    config = {key: value for key, value in config.items() if value is not None}
    with pytest.raises(UserError, match=message):
        ModelConfig.from_hugging_face(config)


def test_rope_theta_in_either_place():
    old = ModelConfig.from_hugging_face(qwen2_folder.hf_config(rope_theta=5e5))
    new = qwen2_folder.hf_config(rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    del new["rope_theta"]
    assert old == ModelConfig.from_hugging_face(new)
