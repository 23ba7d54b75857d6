import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ahead_of_time import needs_libtpu, reports
from conftest import tiny_config

from fgrpo_jax import UserError, ragged, sharding, weights
from fgrpo_jax.layout import Layout, SamplerSettings, cache_bytes, slots_that_fit
from fgrpo_jax.logprobs import response_logprobs
from fgrpo_jax.model import Policy
from fgrpo_jax.sampler import gather, make_sampler
from fgrpo_jax.sampling import Sampling
from fgrpo_jax.slots import make_programs
from fgrpo_jax.structs import Prompts

T, C, N = 12, 5, 4
STOP = (3, 7)
TEXTS = [[5, 9, 11], [20, 21, 22, 23, 24], [40]]
KEY = jax.random.key(0, impl="threefry2x32")


def settings(temperature=1.0, **changes):
    fields = dict(
        samples=N, response=T, sampling=Sampling(temperature), stop_ids=STOP, chunk=5, slots=64
    )
    return SamplerSettings(**(fields | changes))


def prompt_batch(texts, positions=None, width=C):
    tokens = np.zeros((len(texts), width), np.int32)
    for row, text in enumerate(texts):
        tokens[row, width - len(text) :] = text
    lengths = np.array([len(text) for text in texts], np.int32)
    positions = np.arange(len(texts)) if positions is None else np.array(positions)
    return Prompts(tokens, lengths, positions.astype(np.int32), ())


def run(policy, params, prompts, stopped=None, watch=None, **changes):
    s = settings(**changes)
    stream = make_sampler(policy, s, stopped)
    more = (watch,) if watch else ()
    return gather(stream(params, prompts, KEY, *more), len(prompts.length_P) * s.samples, s)


def training_logp(policy, params, prompts, samples, temperature=1.0):
    n = len(samples.tokens_BT) // len(prompts.length_P)
    rows = np.concatenate([np.repeat(prompts.tokens_PC, n, axis=0), samples.tokens_BT], axis=1)
    width = prompts.tokens_PC.shape[1]
    start = jnp.asarray(np.repeat(width - prompts.length_P, n))
    length = samples.tokens_BT.shape[1]
    args = (policy, params, jnp.asarray(rows), start, length, temperature, 512)
    return np.where(samples.mask_BT, response_logprobs(*args)[0], 0)


@pytest.fixture(scope="module")
def samples(policy, params):
    return run(policy, params, prompt_batch(TEXTS))


def test_masks_end_with_the_first_stop_token(samples):
    tokens, mask = samples.tokens_BT, samples.mask_BT
    finished = 0
    for row in range(len(tokens)):
        stops = np.flatnonzero(np.isin(tokens[row], STOP))
        length = stops[0] + 1 if len(stops) else T
        assert mask[row].tolist() == [True] * length + [False] * (T - length)
        assert samples.finished_B[row] == bool(len(stops))
        finished += bool(len(stops))
    assert 0 < finished < len(tokens)  # both kinds are here
    assert not samples.logp_BT[~mask].any() and samples.drawn_logp_BT is None


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_training(policy, params, temperature):
    prompts = prompt_batch(TEXTS)
    out = run(policy, params, prompts, temperature=temperature)
    expected = training_logp(policy, params, prompts, out, temperature)
    np.testing.assert_allclose(out.logp_BT, expected, atol=1e-5, rtol=1e-5)


def test_truncation_gives_both_logprobs(policy, params):
    """The policy's, as training has it; and that of what was sampled from, renormalised."""
    prompts = prompt_batch(TEXTS)
    s = Sampling(0.9, top_k=5, top_p=0.8)
    out = run(policy, params, prompts, sampling=s)
    mask = out.mask_BT
    expected = training_logp(policy, params, prompts, out, 0.9)
    np.testing.assert_allclose(out.logp_BT, expected, atol=1e-5, rtol=1e-5)
    assert (out.drawn_logp_BT >= out.logp_BT)[mask].all()
    assert (out.drawn_logp_BT > out.logp_BT + 0.01)[mask].any()
    # the kept mass is at most 1 and, with the crossing token, above 0 and that of five tokens
    assert (np.exp(out.logp_BT - out.drawn_logp_BT)[mask] <= 1 + 1e-6).all()


def test_rows_do_not_depend_on_the_batch(policy, params, samples):
    for order in ([2, 0], [1], [0, 1, 2, 0]):
        out = run(policy, params, prompt_batch([TEXTS[i] for i in order], order))
        for place, prompt in enumerate(order):
            ours, theirs = (slice(i * N, (i + 1) * N) for i in (place, prompt))
            np.testing.assert_array_equal(out.tokens_BT[ours], samples.tokens_BT[theirs])


def many(count=11):
    """Prompts of lengths 1 to C, more samples than slots."""
    return [[8 + (5 * i + j) % 40 for j in range(1 + i % C)] for i in range(count)]


@pytest.fixture(scope="module")
def whole(policy, params):
    """All rows at once: no slot takes a second sample."""
    return run(policy, params, prompt_batch(many()), chunk=T)


@pytest.mark.parametrize(
    "changes",
    [
        dict(slots=1),
        dict(slots=3, chunk=1),
        dict(slots=5, chunk=2, waiting=1),
        dict(slots=7, waiting=2, prefill=C),
        dict(slots=8, chunk=100, waiting=4, prefill=2 * C),
        dict(slots=16, prefill=2),  # prompts in pieces of two columns
        dict(slots=43),
        dict(slots=44, prefill=3 * C),  # a last group that is not full
        dict(slots=1000, chunk=3),
    ],
    ids=str,
)
def test_any_number_of_slots(policy, params, whole, changes):
    """Also of waiting prompts, of prompts prefilled at a time, of steps a chunk."""
    out = run(policy, params, prompt_batch(many()), **changes)
    np.testing.assert_array_equal(out.tokens_BT, whole.tokens_BT)
    np.testing.assert_array_equal(out.mask_BT, whole.mask_BT)
    np.testing.assert_array_equal(out.finished_B, whole.finished_B)
    np.testing.assert_allclose(out.logp_BT, whole.logp_BT, atol=1e-5)


def test_padding_changes_nothing(policy, params, whole):
    for changes in (dict(), dict(slots=6)):
        out = run(policy, params, prompt_batch(many(), width=9), **changes)
        np.testing.assert_array_equal(out.tokens_BT, whole.tokens_BT)


def test_unrolled_layers_sample_the_same(policy, params, whole):
    unrolled = weights.make_decode_params(policy, sharding.make_mesh(1, 8, 1), unroll=True)(params)
    assert len(unrolled["layers"]) == 2
    out = run(policy, jax.device_get(unrolled), prompt_batch(many()), slots=6)
    np.testing.assert_array_equal(out.tokens_BT, whole.tokens_BT)


def test_long_rows_read_every_width(params):
    """More columns than MIN_WIDTH: several widths, and the cache is moved while rows decode."""
    policy, texts = Policy(tiny_config(), tokens=48), many(6)
    changes = dict(response=150, chunk=40, stop_ids=(47,))
    plain = run(policy, params, prompt_batch(texts), **changes)
    layout = Layout.of(settings(slots=4, **changes), 6, C, False)
    assert layout.widths == (128, 208)
    out = run(policy, params, prompt_batch(texts), slots=4, **changes)
    lengths = plain.mask_BT.sum(1)
    assert lengths.max() == 150 and lengths.min() < 60
    np.testing.assert_array_equal(out.tokens_BT, plain.tokens_BT)
    expected = training_logp(policy, params, prompt_batch(texts), out)
    np.testing.assert_allclose(out.logp_BT, expected, atol=1e-5, rtol=1e-5)


def test_more_samples_begin_with_the_same(policy, params, samples):
    out = run(policy, params, prompt_batch(TEXTS), samples=6)
    shorter = out.tokens_BT.reshape(3, 6, T)[:, :N].reshape(-1, T)
    np.testing.assert_array_equal(shorter, samples.tokens_BT)


def test_samples_of_a_group_differ(samples):
    groups = samples.tokens_BT.reshape(3, N, T)
    assert all(len({tuple(row) for row in group}) > 1 for group in groups)


@pytest.mark.parametrize("slots", [64, 16])
@pytest.mark.parametrize("mesh", [(1, 8, 1), (1, 4, 2), (2, 2, 2)])
def test_eight_devices_sample_the_same(policy, params, mesh, slots):
    prompts = prompt_batch(many(16))
    plain = run(policy, params, prompts)
    mesh = sharding.make_mesh(*mesh)
    with jax.set_mesh(mesh):
        decode_params = weights.make_decode_params(policy, mesh)(params)
        out = run(policy, decode_params, prompts, slots=slots)
    np.testing.assert_array_equal(out.tokens_BT, plain.tokens_BT)
    np.testing.assert_allclose(out.logp_BT, plain.logp_BT, atol=1e-5)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(response=0), "response is 0: it must be at least 1"),
        (dict(slots=0), "slots is 0"),
        (dict(stop_ids=()), "stop_ids is empty"),
    ],
)
def test_settings_that_cannot_be(change, message):
    with pytest.raises(ValueError, match=message):
        settings(**change)


def test_prompts_that_do_not_divide_among_devices(policy, params):
    mesh = sharding.make_mesh(1, 8, 1)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="3 prompts do not divide"):
        run(policy, params, prompt_batch(TEXTS))


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


@pytest.mark.parametrize("slots", [64, 3])
def test_eos_first_and_no_eos_are_told_apart(policy, params, slots):
    for token, length, finished in ((3, 1, True), (7, 1, True), (9, T, False)):
        always, its_params = forced(policy, params, token)
        out = run(always, its_params, prompt_batch([[5, 6], [5]]), slots=slots)
        assert out.mask_BT.sum(axis=1).tolist() == [length] * 2 * N
        assert out.finished_B.tolist() == [finished] * 2 * N
        assert set(out.tokens_BT[out.mask_BT].tolist()) == {token}


@pytest.mark.parametrize("slots", [64, 5])
def test_response_of_one_token(policy, params, slots):
    out = run(policy, params, prompt_batch(TEXTS), response=1, slots=slots)
    assert out.tokens_BT.shape == (12, 1) and out.mask_BT.all()


def test_one_prompt_of_the_full_width(policy, params):
    prompts = prompt_batch([[9] * 40], width=40)
    out = run(policy, params, prompts, samples=1)
    assert out.mask_BT[0, 0]
    expected = training_logp(policy, params, prompts, out)
    np.testing.assert_allclose(out.logp_BT, expected, atol=1e-5, rtol=1e-5)


def test_greedy(policy, params):
    prompts = prompt_batch(TEXTS)
    out = run(policy, params, prompts, temperature=0.0)
    groups = out.tokens_BT.reshape(3, N, T)
    assert (groups == groups[:, :1]).all()
    rows = np.concatenate([np.repeat(prompts.tokens_PC, N, axis=0), out.tokens_BT], axis=1)
    start = jnp.asarray(np.repeat(C - prompts.length_P, N))
    hidden = policy.hidden(params, jnp.asarray(rows), start)[:, C - 1 : -1]
    best = np.asarray(policy.logits(params, hidden, 1.0).argmax(-1))
    np.testing.assert_array_equal(best[out.mask_BT], out.tokens_BT[out.mask_BT])
    assert not out.drawn_logp_BT.any()  # all probability was on it


def test_rows_that_the_tokenizer_does_not_know_are_never_sampled(params):
    policy = Policy(tiny_config(), tokens=12)
    out = run(policy, params, prompt_batch([[5]]), samples=64)
    assert out.tokens_BT.max() < 12


def test_each_function_is_compiled_once(policy, params):
    """Chunks, refills, and then other prompts: nothing is compiled in a second call."""
    compiled = []

    def listener(name, *_, fun_name="", **__):
        if "backend_compile" in name:
            compiled.append(fun_name)

    stream = make_sampler(policy, settings(slots=6, chunk=4))
    batches = [prompt_batch(many()), prompt_batch(many()[::-1])]
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        for prompts in batches:
            list(stream(params, prompts, KEY))
            compiled.append("second call")
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    first = compiled.index("second call")
    for name in ("prefill", "decode", "move_back"):
        assert compiled[:first].count(f"jit({name})") == 1, compiled
    assert compiled[first + 1 :] == ["second call"], compiled


def test_empty_prompts_say_nothing(policy, params, samples):
    for slots in (64, 3):
        out = run(policy, params, prompt_batch([TEXTS[0], [], TEXTS[2]], [0, 1, 2]), slots=slots)
        assert out.mask_BT[:N].any() and not out.mask_BT[N : 2 * N].any()
        np.testing.assert_array_equal(out.tokens_BT[2 * N :], samples.tokens_BT[2 * N :])


def test_responses_stream_as_they_end(policy, params):
    """And the watch sees how far it is, or ends it."""
    seen = []
    stream = make_sampler(policy, settings(slots=6, chunk=2))
    prompts = prompt_batch(many())
    parts = list(stream(params, prompts, KEY, lambda *numbers: seen.append(numbers)))
    assert len(parts) > 5 and sorted(r.row for part in parts for r in part) == list(range(44))
    assert seen[-1][:2] == (44, 44)
    assert seen[-1][2] == sum(len(r.tokens) for part in parts for r in part)
    assert seen[-1][2] / 6 <= seen[-1][3] < 2 * seen[-1][2] / 6  # steps of six slots
    ended = np.cumsum([0, *(len(p) for p in parts)])  # before each chunk, and at the end
    assert [responses for responses, *_ in seen] == ended.tolist()

    def stop(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(stream(params, prompts, KEY, stop))


@pytest.mark.parametrize("slots", [64, 6])
def test_text_that_stops_ends_its_row(policy, params, whole, slots):
    """A row ends with its first token above 40 and its slot goes on; others are as without."""

    def stopped(tokens, new):
        assert 0 < new <= 5
        ends = np.flatnonzero(tokens > 40)
        assert not len(ends) or ends[0] >= len(tokens) - new  # was told at once
        return int(ends[0]) + 1 if len(ends) else None

    out = run(policy, params, prompt_batch(many()), stopped, slots=slots)
    cut = 0
    for row in range(44):
        tokens = whole.tokens_BT[row][whole.mask_BT[row]]
        ends = np.flatnonzero(tokens > 40)
        kept = tokens[: ends[0] + 1] if len(ends) else tokens
        assert out.tokens_BT[row][out.mask_BT[row]].tolist() == kept.tolist()
        assert out.finished_B[row] == (whole.finished_B[row] or bool(len(ends)))
        cut += len(kept) < len(tokens)
    assert cut > 3


def test_cache_bytes_are_those_of_the_program(policy, params):
    """What the compiled loop holds beside the parameters is the cache, within a tenth."""
    s = settings(response=300, slots=16)
    layout = Layout.of(s, 40, C, False)
    # by hand: 2 layers, 2 heads of 8, float32, keys and values
    assert layout.waiting == 4 and layout.cached == 320  # of 5 + 300 + 5, in tiles of 16
    assert cache_bytes(policy, layout) == 2 * 2 * 2 * 8 * 4 * (16 * 320 + 4 * 5)  # bytes
    programs = make_programs(policy, s)
    slots, room = programs.empty(params, layout)
    memory = programs.decode.lower(
        params, slots, room, np.int32(0), np.int32(C), KEY, jnp.zeros(16, bool), np.int32(1),
        width=layout.cached,
    ).compile().memory_analysis()  # fmt: skip
    held = memory.argument_size_in_bytes - sum(x.nbytes for x in jax.tree.leaves(params))
    assert held == pytest.approx(cache_bytes(policy, layout), rel=0.1)
    assert memory.alias_size_in_bytes > 0.9 * held  # donated


def test_slots_that_fit(policy):
    s = settings(response=300)
    column = 2 * 2 * 2 * 8 * 4  # bytes
    slots = slots_that_fit(policy, s, C, 0.01)
    assert slots == int(0.01 * 2**30 / (column * (320 + 5 * (1 + 4 * 5 / 300) / 4) + 3 * 4 * 48))
    layout = Layout.of(settings(slots=slots, response=300), 100_000, C, False)
    assert 0.9 < cache_bytes(policy, layout) / (0.01 * 2**30) <= 1
    with jax.set_mesh(sharding.make_mesh(1, 4, 2)):
        assert slots_that_fit(policy, s, C, 0.01) == pytest.approx(8 * slots, rel=0.01)
    with pytest.raises(UserError, match="1e-09 and holds no slot: one of 5 . 300 tokens needs"):
        slots_that_fit(policy, s, C, 1e-9)
    waiting = dataclasses.replace(s, waiting=1000)  # prompts, of the same memory
    assert slots_that_fit(policy, waiting, C, 0.01) < 0.9 * slots


def test_kernels_sample_the_same(policy, params, monkeypatch):
    """Splash prefill and ragged decode, as interpreted on a CPU."""
    monkeypatch.setattr(ragged, "INTERPRET", True)
    kernels = dataclasses.replace(policy, backends=("splash", "ragged"))
    prompts = prompt_batch(many(4))
    plain = run(policy, params, prompts, slots=6, response=6)
    out = run(kernels, params, prompts, slots=6, response=6)
    np.testing.assert_array_equal(out.tokens_BT, plain.tokens_BT)
    np.testing.assert_allclose(out.logp_BT, plain.logp_BT, atol=1e-5)


@needs_libtpu
@pytest.mark.parametrize(
    "options",
    ["model.attention=xla", "model.attention=splash", "rollout.top_k=20 rollout.top_p=0.95"],
)
def test_the_decode_loop_of_7b_compiled_for_a_v5e_16(options):
    """256 slots of 1,024 + 3,072 columns, fsdp 4 x tp 4: nothing copies the cache or a weight,
    and what travels is the hidden state after embedding, attention and MLP."""
    cache, decode, move_back, prefill = reports(
        "tpu_sampler.py", "v5e:4x4", "mesh.tp=4", *options.split()
    )
    assert decode["aliased"] == pytest.approx(cache["cache"], rel=0.1)
    assert decode["temporaries"] < 0.02 * cache["cache"]
    assert move_back["temporaries"] < 0.02 * cache["cache"]  # a layer's
    hidden = 256 // 4 * 3584 * 2  # bytes of a device's rows
    large = [(kind, size) for kind, size in decode["collectives"] if size > 1024]
    assert large == [("all-reduce", hidden)] * 3
    # and numbers of rows, by which the devices of tp agree on a token
    kinds = {"all-reduce", "all-gather", "collective-permute"}
    assert {kind for kind, _ in decode["collectives"]} <= kinds
    assert not move_back["collectives"]
    # of 8,192 tokens at a time, whose columns the devices of tp share between layers
    hidden = 8192 * 3584 * 2
    large = {size for _, size in prefill["collectives"] if size > 32768}
    assert large == {hidden, hidden // 4} and len(prefill["collectives"]) < 20
    assert prefill["temporaries"] < 2**30
