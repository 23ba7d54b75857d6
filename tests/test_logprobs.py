import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fgrpo_jax.logprobs import response_logprobs


@pytest.fixture(scope="module")
def rows():
    return jax.random.randint(jax.random.key(5), (3, 11), 0, 48), jnp.array([0, 2, 4])


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_against_numpy(policy, params, rows, temperature):
    tokens, start = rows
    hidden = policy.hidden(params, tokens, start)
    logits = np.asarray(policy.logits(params, hidden, 1.0), np.float64) / temperature
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    logp, entropy = response_logprobs(policy, params, tokens, start, 6, temperature, 512)
    for b in range(3):
        for t in range(6):
            at = p[b, 4 + t]  # column 4 + t predicts column 5 + t, the t-th response token
            np.testing.assert_allclose(logp[b, t], np.log(at[tokens[b, 5 + t]]), atol=2e-5)
            np.testing.assert_allclose(entropy[b, t], -(at * np.log(at)).sum(), atol=2e-5)


@pytest.mark.parametrize("chunk", [1, 4, 5, 6])
def test_chunks_change_nothing(policy, params, rows, chunk):
    tokens, start = rows

    def total(params, chunk):
        logp, entropy = response_logprobs(policy, params, tokens, start, 6, 1.0, chunk)
        return logp.sum(), entropy

    whole, piecewise = (
        jax.value_and_grad(total, has_aux=True)(params, size) for size in (512, chunk)
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), whole, piecewise
    )


def test_no_array_of_all_logits(policy, params, rows):
    """The largest array of the compiled gradient is far below [B, T, V]."""
    tokens = jnp.zeros((4, 65), jnp.int32)
    start = jnp.zeros(4, jnp.int32)
    policy = type(policy)(policy.config.__class__(**{**vars(policy.config), "vocab": 4096}))
    shapes = jax.eval_shape(policy.init, jax.random.key(0))
    loss = lambda params: response_logprobs(policy, params, tokens, start, 64, 1.0, 4)[0].sum()
    text = jax.jit(jax.grad(loss)).lower(shapes).as_text()
    assert "4x64x4096" not in text and "4x4x4096" in text


def test_temperature_divides_the_training_logits(policy, params, rows):
    tokens, start = rows
    cold, warm = (
        response_logprobs(policy, params, tokens, start, 6, t, 512)[1].mean() for t in (0.5, 2.0)
    )
    assert cold < warm


def test_unknown_rows_give_no_nan(params, rows):
    from conftest import tiny_config

    from fgrpo_jax.model import Policy

    tokens, start = rows
    tokens = jnp.minimum(tokens, 39)
    policy = Policy(tiny_config(), tokens=40)
    loss = lambda params: sum(
        x.sum() for x in response_logprobs(policy, params, tokens, start, 6, 1.0, 512)
    )
    value, grad = jax.value_and_grad(loss)(params)
    assert np.isfinite(value) and all(np.isfinite(g).all() for g in jax.tree.leaves(grad))
