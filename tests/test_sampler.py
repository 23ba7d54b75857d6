import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import tiny_config

from fgrpo_jax import sharding, weights
from fgrpo_jax.logprobs import response_logprobs
from fgrpo_jax.model import Policy
from fgrpo_jax.sampler import SamplerSettings, make_sampler, sample_token

T, C, N = 12, 5, 4
STOP = (3, 7)


def settings(**changes):
    fields = dict(samples=N, response=T, temperature=1.0, stop_ids=STOP, chunk=5)
    return SamplerSettings(**(fields | changes))


def keys(prompt_keys, samples=N):
    out = [jax.random.fold_in(jax.random.key(k), i) for k in prompt_keys for i in range(samples)]
    return jnp.stack(out)


def prompt_batch(texts, width=C):
    tokens = np.zeros((len(texts), width), np.int32)
    for row, text in enumerate(texts):
        tokens[row, width - len(text) :] = text
    return jnp.asarray(tokens), jnp.array([len(text) for text in texts], jnp.int32)


TEXTS = [[5, 9, 11], [20, 21, 22, 23, 24], [40]]


@pytest.fixture(scope="module")
def samples(policy, params):
    sample = make_sampler(policy, settings())
    return sample(params, *prompt_batch(TEXTS), keys([0, 1, 2]))


def test_masks_end_with_the_first_stop_token(samples):
    tokens, mask = np.asarray(samples.tokens_BT), np.asarray(samples.mask_BT)
    finished = 0
    for row in range(len(tokens)):
        stops = np.flatnonzero(np.isin(tokens[row], STOP))
        length = stops[0] + 1 if len(stops) else T
        assert mask[row].tolist() == [True] * length + [False] * (T - length)
        assert samples.finished_B[row] == bool(len(stops))
        finished += bool(len(stops))
    assert 0 < finished < len(tokens)  # both kinds are here
    assert not np.asarray(samples.logp_BT)[~mask].any()


def test_logprobs_are_those_of_training(policy, params, samples):
    tokens, length = prompt_batch(TEXTS)
    rows = jnp.concatenate([jnp.repeat(tokens, N, axis=0), samples.tokens_BT], axis=1)
    start = jnp.repeat(C - length, N)
    logp, _ = response_logprobs(policy, params, rows, start, T, 1.0, 512)
    np.testing.assert_allclose(
        jnp.where(samples.mask_BT, logp, 0), samples.logp_BT, atol=1e-5, rtol=1e-5
    )


def test_temperature_is_in_both(policy, params):
    sample = make_sampler(policy, settings(temperature=0.7))
    out = sample(params, *prompt_batch(TEXTS), keys([0, 1, 2]))
    tokens, length = prompt_batch(TEXTS)
    rows = jnp.concatenate([jnp.repeat(tokens, N, axis=0), out.tokens_BT], axis=1)
    logp, _ = response_logprobs(policy, params, rows, jnp.repeat(C - length, N), T, 0.7, 512)
    np.testing.assert_allclose(jnp.where(out.mask_BT, logp, 0), out.logp_BT, atol=1e-5, rtol=1e-5)


def test_rows_do_not_depend_on_the_batch(policy, params, samples):
    sample = make_sampler(policy, settings())
    for order in ([2, 0], [1], [0, 1, 2, 0]):
        out = sample(params, *prompt_batch([TEXTS[i] for i in order]), keys(order))
        for place, prompt in enumerate(order):
            ours, theirs = (slice(i * N, (i + 1) * N) for i in (place, prompt))
            np.testing.assert_array_equal(out.tokens_BT[ours], samples.tokens_BT[theirs])


def test_padding_and_chunks_change_nothing(policy, params, samples):
    for width, chunk in ((9, 1), (C, T), (C, 100)):
        sample = make_sampler(policy, settings(chunk=chunk))
        out = sample(params, *prompt_batch(TEXTS, width), keys([0, 1, 2]))
        np.testing.assert_array_equal(out.tokens_BT, samples.tokens_BT)
        np.testing.assert_array_equal(out.mask_BT, samples.mask_BT)


def test_more_samples_begin_with_the_same(policy, params, samples):
    out = make_sampler(policy, settings(samples=6))(
        params, *prompt_batch(TEXTS), keys([0, 1, 2], 6)
    )
    shorter = np.asarray(out.tokens_BT).reshape(3, 6, T)[:, :N].reshape(-1, T)
    np.testing.assert_array_equal(shorter, samples.tokens_BT)


def test_samples_of_a_group_differ(samples):
    groups = np.asarray(samples.tokens_BT).reshape(3, N, T)
    assert all(len({tuple(row) for row in group}) > 1 for group in groups)


@pytest.mark.parametrize("mesh", [(1, 8, 1), (1, 4, 2), (2, 2, 2)])
def test_eight_devices_sample_the_same(policy, params, mesh):
    texts = [[i + 8, i + 9] for i in range(8)]
    plain = make_sampler(policy, settings())(params, *prompt_batch(texts), keys(range(8)))
    mesh = sharding.make_mesh(*mesh)
    with jax.set_mesh(mesh):
        decode_params = weights.make_decode_params(policy, mesh)(params)
        tokens, length = prompt_batch(texts)
        out = make_sampler(policy, settings())(
            decode_params,
            jax.device_put(tokens, sharding.activation(mesh, "BT")),
            jax.device_put(length, sharding.activation(mesh, "B")),
            jax.device_put(keys(range(8)), sharding.activation(mesh, "B")),
        )
    np.testing.assert_array_equal(out.tokens_BT, plain.tokens_BT)
    np.testing.assert_allclose(out.logp_BT, plain.logp_BT, atol=1e-5)


def forced(policy, params, token):
    """A policy that always says `token`."""
    weight = params["embed_tokens"]["weight"]
    config = tiny_config(tied=False)
    head = jnp.zeros_like(weight).at[token].set(100 * params["norm"]["weight"])
    flat = jax.tree.map(jnp.zeros_like, params["layers"])
    one = {"weight": jnp.ones_like(weight)}
    return Policy(config), {
        **params,
        "layers": flat,
        "embed_tokens": one,
        "lm_head": {"weight": head},
    }


def test_eos_first_and_no_eos_are_told_apart(policy, params):
    for token, length, finished in ((3, 1, True), (7, 1, True), (9, T, False)):
        always, its_params = forced(policy, params, token)
        out = make_sampler(always, settings())(its_params, *prompt_batch([[5, 6]]), keys([0]))
        assert out.mask_BT.sum(axis=1).tolist() == [length] * N
        assert out.finished_B.tolist() == [finished] * N
        assert set(np.asarray(out.tokens_BT)[np.asarray(out.mask_BT)].tolist()) == {token}


def test_response_of_one_token(policy, params):
    out = make_sampler(policy, settings(response=1))(params, *prompt_batch(TEXTS), keys([0, 1, 2]))
    assert out.tokens_BT.shape == (12, 1) and out.mask_BT.all()


def test_greedy(policy, params):
    out = make_sampler(policy, settings(temperature=0.0))(
        params, *prompt_batch(TEXTS), keys([0, 1, 2])
    )
    tokens, length = prompt_batch(TEXTS)
    groups = np.asarray(out.tokens_BT).reshape(3, N, T)
    assert (groups == groups[:, :1]).all()
    rows = jnp.concatenate([jnp.repeat(tokens, N, axis=0), out.tokens_BT], axis=1)
    hidden = policy.hidden(params, rows, jnp.repeat(C - length, N))[:, C - 1 : -1]
    best = policy.logits(params, hidden, 1.0).argmax(-1)
    mask = np.asarray(out.mask_BT)
    np.testing.assert_array_equal(np.asarray(best)[mask], np.asarray(out.tokens_BT)[mask])


def test_rows_that_the_tokenizer_does_not_know_are_never_sampled(params):
    policy = Policy(tiny_config(), tokens=12)
    out = make_sampler(policy, settings(samples=64))(params, *prompt_batch([[5]]), keys([0], 64))
    assert out.tokens_BT.max() < 12


@pytest.mark.parametrize("vocab", [1, 2, 3, 48, 100, 257])
def test_sample_token_against_the_distribution_function(vocab):
    logits = 2 * jax.random.normal(jax.random.key(vocab), (1, vocab))
    p = np.asarray(jax.nn.softmax(logits[0]), np.float64)
    uniform = (np.arange(20_000) + 0.5) / 20_000
    drawn = sample_token(
        jnp.broadcast_to(logits, (20_000, vocab)), jnp.asarray(uniform, jnp.float32)
    )
    share = np.bincount(np.asarray(drawn), minlength=vocab) / 20_000
    np.testing.assert_allclose(share, p, atol=1.5e-4)


def test_sample_token_never_draws_what_has_no_probability():
    logits = jnp.full((3, 100), -1e30).at[:, 41].set(0.0)
    almost_one = np.nextafter(np.float32(1), np.float32(0))
    assert sample_token(logits, jnp.array([0.0, 0.5, almost_one])).tolist() == [41] * 3


def test_each_function_is_compiled_once(policy, params):
    """Three chunks, and then other prompts and keys: one prefill, one decode loop."""
    compiled = []

    def listener(name, *_, fun_name="", **__):
        if "backend_compile" in name:
            compiled.append(fun_name)

    inputs = [(prompt_batch(TEXTS), keys([seed, 1, 2])) for seed in (0, 3)]
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        sample = make_sampler(policy, settings(chunk=4))
        for prompts, key in inputs:
            sample(params, *prompts, key)
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    assert len(compiled) == 2, compiled


def test_empty_prompts_say_nothing(policy, params):
    tokens, length = prompt_batch([TEXTS[0], []])
    out = make_sampler(policy, settings())(params, tokens, length, keys([0, 1]))
    assert out.mask_BT[:N].any() and not out.mask_BT[N:].any()
