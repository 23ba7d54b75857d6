"""Attention against explicit float64 loops; the kernels against the plain functions, interpreted
on the CPU; and, where libtpu is installed, compiled for TPUs that are not here."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ahead_of_time import needs_libtpu, reports
from jax.experimental.pallas import tpu as pltpu

from fgrpo_jax import UserError, attention, choices, ragged, sharding
from fgrpo_jax.attention import ATTENTION, causal_attention, decode_attention, resolve

MESHES = [(1, 2, 4), (2, 2, 2)]  # replica, fsdp, tp


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


@pytest.fixture
def on_cpu(monkeypatch):
    """TPU kernels interpreted, and what is asked of cuDNN computed by XLA."""
    plain = jax.nn.dot_product_attention

    def instead(*args, implementation, **kwargs):
        assert implementation == "cudnn"
        return plain(*args, **kwargs)

    monkeypatch.setattr(ragged, "INTERPRET", True)
    monkeypatch.setattr(ragged, "CACHE_BLOCK", 1)  # bytes: blocks of 128 columns
    monkeypatch.setattr(jax.nn, "dot_product_attention", instead)


def loop(q_H, keys_SH, values_SH):
    """One query's attention over the keys it sees, in float64, one key after the other."""
    q_H = np.asarray(q_H, np.float64)
    scores = [sum(np.asarray(k, np.float64) * q_H) / len(q_H) ** 0.5 for k in keys_SH]
    weights = [np.exp(score - max(scores)) for score in scores]
    total = np.zeros(len(q_H))
    for weight, v in zip(weights, values_SH, strict=True):
        total += weight / sum(weights) * np.asarray(v, np.float64)
    return total


def causal_loop(q_BTQH, k_BKSH, v_BKSH, start_B):
    """NaN where a query comes before its row."""
    (B, T, Q, H), (_, K, S, _) = q_BTQH.shape, k_BKSH.shape
    out_BTQH = np.full((B, T, Q, H), np.nan)
    for b in range(B):
        for t in range(T):
            first, column = int(start_B[b]), S - T + t
            for h in range(Q if column >= first else 0):
                seen = np.s_[b, h // (Q // K), first : column + 1]
                out_BTQH[b, t, h] = loop(q_BTQH[b, t, h], k_BKSH[seen], v_BKSH[seen])
    return out_BTQH


def real(case):
    """Where a query is not padding, [B T Q H]."""
    q_BTQH, k_BKSH, _, start_B = case
    S = k_BKSH.shape[2]
    real_BT = jnp.arange(S - q_BTQH.shape[1], S)[None] >= start_B[:, None]
    return jnp.broadcast_to(real_BT[:, :, None, None], q_BTQH.shape)


def causal_case(T, S, K=1, G=1, H=8, B=3, dtype=jnp.float32):
    start_B = jnp.array([0, 2, S - 1] * B, jnp.int32)[:B]
    q = normal(0, B, T, K * G, H, dtype=dtype)
    return q, normal(1, B, K, S, H, dtype=dtype), normal(2, B, K, S, H, dtype=dtype), start_B


def run(case, backend):
    return jax.jit(functools.partial(causal_attention, backend=backend))(*case)


def gradients(case, backend):
    """Of a loss that reads no padding, as every loss here."""
    *qkv, start_B = case

    def loss(*qkv):
        out_BTQH = causal_attention(*qkv, start_B, backend)
        return jnp.where(real(case), jnp.sin(3 * out_BTQH.astype(jnp.float32)), 0).sum()

    return jax.jit(jax.grad(loss, (0, 1, 2)))(*qkv)


@pytest.mark.parametrize("T, S", [(9, 9), (4, 9), (1, 6)])
@pytest.mark.parametrize(
    "backend, G", [("xla", 1), ("xla", 3), ("xla", 7), ("splash", 3), ("cudnn", 3)]
)
def test_it_is_the_loop(backend, G, T, S, on_cpu):
    case = causal_case(T, S, K=2, G=G)
    out, expected = run(case, backend), causal_loop(*map(np.asarray, case))
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out[real(case)], expected[real(case)], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "backend, T, S, K, G",
    [
        ("splash", 128, 128, 2, 1),
        ("splash", 131, 131, 1, 7),
        ("splash", 5, 700, 2, 1),
        ("splash", 300, 301, 1, 2),
        ("cudnn", 9, 9, 2, 3),
        ("cudnn", 4, 9, 2, 3),
    ],
)
def test_it_is_xla_and_so_is_its_gradient(backend, T, S, K, G, on_cpu):
    case = causal_case(T, S, K, G, H=64)
    out, xla = (run(case, b)[real(case)] for b in (backend, "xla"))
    np.testing.assert_allclose(out, xla, rtol=1e-4, atol=1e-5)
    for ours, xla in zip(gradients(case, backend), gradients(case, "xla"), strict=True):
        np.testing.assert_allclose(ours, xla, rtol=1e-3, atol=1e-4)


def packed_parts(B, T):
    """Random parts of 1 to T / 3 columns, then padding; the last row is all padding."""
    random = np.random.default_rng(3)
    sizes = random.integers(1, T // 3 + 1, (B, T))
    part_BT = 1 + (np.arange(T)[None, :, None] >= sizes.cumsum(axis=1)[:, None]).sum(axis=2)
    padding_BT = np.arange(T)[None] >= random.integers(T // 2, T + 1, B)[:, None]
    part_BT = np.where(padding_BT, 0, part_BT)
    part_BT[-1] = 0
    return jnp.asarray(part_BT, jnp.int32)


@pytest.mark.parametrize("backend", ["xla", "splash"])
def test_packed_columns_see_their_own_part(backend, on_cpu):
    T = 12
    q, k, v, _ = causal_case(T, T, K=2, G=3)
    part_BT, zero_B = packed_parts(3, T), jnp.zeros(3, jnp.int32)
    out = causal_attention(q, k, v, zero_B, backend, part_BT)
    for b, t in np.ndindex(3, T):
        seen = [j for j in range(t + 1) if part_BT[b, j] == part_BT[b, t]]
        # the kernel's padding on the left is unseen, but by padding
        if part_BT[b, t] or backend == "xla":
            for h in range(6):
                own = loop(
                    q[b, t, h], np.asarray(k)[b, h // 3, seen], np.asarray(v)[b, h // 3, seen]
                )
                np.testing.assert_allclose(out[b, t, h], own, rtol=1e-4, atol=1e-6)
    assert np.isfinite(out).all()


@pytest.mark.parametrize("T, K, G", [(128, 2, 1), (131, 1, 7), (700, 1, 2)])
def test_packed_rows_of_the_kernel_are_xla_s(T, K, G, on_cpu):
    q, k, v, _ = causal_case(T, T, K, G, H=64)
    part_BT, zero_B = packed_parts(3, T), jnp.zeros(3, jnp.int32)
    real_BTQH = jnp.broadcast_to((part_BT > 0)[..., None, None], q.shape)

    def loss(backend, q, k, v):
        out = causal_attention(q, k, v, zero_B, backend, part_BT)
        return jnp.where(real_BTQH, jnp.sin(3 * out), 0).sum(), out

    (ours, ours_out), (xla, xla_out) = (
        jax.jit(jax.grad(functools.partial(loss, b), (0, 1, 2), has_aux=True))(q, k, v)
        for b in ("splash", "xla")
    )
    np.testing.assert_allclose(ours_out[real_BTQH], xla_out[real_BTQH], rtol=1e-4, atol=1e-5)
    for x, y in zip(ours, xla, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("shape", MESHES)
@pytest.mark.parametrize("backend", ["xla", "splash"])
def test_a_mesh_changes_nothing_of_packed_rows(shape, backend, on_cpu):
    *qkv, _ = causal_case(20, 20, K=4, G=2, B=8)
    case = (*qkv, jnp.zeros(8, jnp.int32), packed_parts(8, 20))
    packed = lambda *case: causal_attention(*case[:4], backend, case[4])
    mesh = sharding.make_mesh(*shape)
    with jax.set_mesh(mesh):
        there = jax.jit(packed)(*lay(case, mesh, "BTQH BKSH BKSH B BT"))
    np.testing.assert_allclose(there, jax.jit(packed)(*case), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend, S", [("cudnn", 12), ("splash", 16)])
def test_what_packed_rows_cannot_be(backend, S, on_cpu):
    *qkv, start_B = causal_case(12, S)
    with pytest.raises(ValueError, match=f"attention {backend} knows no such packed rows"):
        causal_attention(*qkv, start_B, backend, packed_parts(3, 12))


def test_splash_blocks_pad_little_and_keep_their_order():
    blocks = [(n, attention._splash_block(n)) for n in range(1, 5000)]
    padded = [-(-n // block) * block for n, block in blocks]
    assert padded == sorted(padded)  # so S >= T stays true
    assert all(n <= p < n + 128 * (1 + n // 512) for n, p in enumerate(padded, 1))


def lay(arrays, mesh, axes):
    shardings = [sharding.activation(mesh, a) for a in axes.split()]
    return [jax.device_put(x, s) for x, s in zip(arrays, shardings, strict=True)]


@pytest.mark.parametrize("shape", MESHES)
@pytest.mark.parametrize("backend", ["xla", "splash", "cudnn"])
def test_a_mesh_changes_nothing(shape, backend, on_cpu):
    case = causal_case(20, 24, K=4, G=2, B=8)
    out, grads = run(case, backend), gradients(case, backend)
    mesh = sharding.make_mesh(*shape)
    with jax.set_mesh(mesh):
        laid = lay(case, mesh, "BTQH BKSH BKSH B")
        there = run(laid, backend)
        assert there.sharding.is_equivalent_to(sharding.activation(mesh, "BTQH"), 4)
        grads_there = gradients(laid, backend)
    np.testing.assert_allclose(there, out, rtol=1e-5, atol=1e-6)
    for one, eight in zip(grads, grads_there, strict=True):
        np.testing.assert_allclose(eight, one, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [None, *MESHES])
def test_cudnn_is_called_for_a_gpu(shape, monkeypatch):
    from jax._src.cudnn import fused_attention_stablehlo

    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    case = causal_case(20, 24, K=4, G=7, H=64, B=8, dtype=jnp.bfloat16)
    grad = lambda *case: gradients(case, "cudnn")
    mesh = sharding.make_mesh(*shape or (1, 1, 8))
    with jax.set_mesh(mesh if shape else jax.sharding.get_mesh()):
        text = jax.jit(grad).trace(*case).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__cudnn$fmhaSoftmax(") == text.count("__cudnn$fmhaSoftmaxBackward(") == 1
    assert "scatter" not in text


@pytest.mark.gpu
@pytest.mark.parametrize("T, S", [(128, 128), (37, 131)])
@pytest.mark.parametrize("H", [64, 128])
def test_cudnn_is_xla(T, S, H):
    case = causal_case(T, S, K=2, G=7, H=H, dtype=jnp.bfloat16)
    out, xla = (np.asarray(run(case, b), np.float32) for b in ("cudnn", "xla"))
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out[real(case)], xla[real(case)], atol=0.03)
    for ours, xla in zip(gradients(case, "cudnn"), gradients(case, "xla"), strict=True):
        ours, xla = np.asarray(ours, np.float32), np.asarray(xla, np.float32)
        assert np.linalg.norm(ours - xla) < 0.02 * np.linalg.norm(xla)


# one new token a row

STARTS = [0, 5, 127, 128, 129, 250, 251, 600]  # with S = 251: inside, at the end and past it
COLUMNS = [0, 1, 5, 6, 127, 128, 129, 130, 250, 251]


def decode_case(S=251, K=2, G=3, H=16, L=3, dtype=jnp.float32, starts=STARTS):
    B = len(starts)
    own_and_cache = [(B, K * G, H), (B, K, H), (B, K, H), (L, B, K, S, H), (L, B, K, S, H)]
    arrays = [normal(i, *shape, dtype=dtype) for i, shape in enumerate(own_and_cache)]
    return arrays, jnp.array(starts, jnp.int32)


def decode(backend):
    def at(arrays, layer, start_B, column, width=None):
        layer, column = jnp.int32(layer), jnp.int32(column)
        return step(*arrays, layer, start_B, column, width=width or arrays[-1].shape[3])

    step = jax.jit(functools.partial(decode_attention, backend=backend), static_argnames="width")
    return at


def decode_loop(arrays, layer, start_B, column):
    q_BQH, own_k_BKH, own_v_BKH, k_LBKSH, v_LBKSH = map(np.asarray, arrays)
    out_BQH, G = np.zeros(q_BQH.shape), q_BQH.shape[1] // own_k_BKH.shape[1]
    for b, start in enumerate(np.asarray(start_B)):
        for h in range(q_BQH.shape[1]):
            seen, own = np.s_[layer, b, h // G, start:column], np.s_[b, h // G, None]
            keys = np.concatenate([k_LBKSH[seen], own_k_BKH[own]])
            values = np.concatenate([v_LBKSH[seen], own_v_BKH[own]])
            out_BQH[b, h] = loop(q_BQH[b, h], keys, values)
    return out_BQH


@pytest.mark.parametrize("G", [1, 3, 7])
def test_decode_is_the_loop(G):
    arrays, start_B = decode_case(S=12, G=G, starts=[0, 3, 11, 12, 20])
    step = decode("xla")
    for layer, column, width in [(0, 0, 1), (1, 1, 4), (2, 4, 4), (0, 11, 12), (2, 12, 12)]:
        np.testing.assert_allclose(
            step(arrays, layer, start_B, column, width),
            decode_loop(arrays, layer, start_B, column),
            rtol=1e-4,
            atol=1e-6,
        )


@pytest.mark.parametrize("K, G, H", [(2, 3, 16), (1, 7, 64), (4, 7, 128), (1, 1, 128)])
def test_ragged_is_xla(K, G, H, on_cpu):
    arrays, start_B = decode_case(K=K, G=G, H=H)
    ragged, xla = decode("ragged"), decode("xla")
    for i, column in enumerate(COLUMNS):
        at = (arrays, i % 3, start_B, column)
        np.testing.assert_allclose(ragged(*at), xla(*at), rtol=1e-4, atol=1e-6, err_msg=str(column))


@pytest.mark.parametrize("H", [64, 128])
def test_ragged_in_bfloat16(H, on_cpu):
    arrays, start_B = decode_case(H=H, G=7, dtype=jnp.bfloat16)
    out = decode("ragged")(arrays, 1, start_B, 200)
    assert out.dtype == jnp.bfloat16
    exact = decode_loop([x.astype(jnp.float32) for x in arrays], 1, start_B, 200)
    np.testing.assert_allclose(np.asarray(out, np.float32), exact, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("H", [16, 128])
@pytest.mark.parametrize("backend, garbage", [("xla", 1e4), ("ragged", 1e4), ("ragged", np.nan)])
def test_the_cache_outside_a_row_is_not_read(backend, garbage, H, on_cpu):
    arrays, start_B = decode_case(H=H)
    *own, k_LBKSH, v_LBKSH = arrays
    step, column_S = decode(backend), np.arange(251)
    for layer, column in [(0, 0), (1, 7), (2, 130), (0, 251)]:
        clean = step(arrays, layer, start_B, column)
        seen_BS = (column_S >= np.asarray(start_B)[:, None]) & (column_S < column)
        seen = seen_BS[None, :, None, :, None] & (np.arange(3) == layer)[:, None, None, None, None]
        dirty = [jnp.where(seen, x, garbage) for x in (k_LBKSH, v_LBKSH)]
        np.testing.assert_array_equal(step([*own, *dirty], layer, start_B, column), clean)


@pytest.mark.parametrize("H", [16, 128])
def test_ragged_reads_nothing_uninitialised(H, on_cpu, monkeypatch):
    """A simulated TPU, whose memory is NaN until written and which refuses reads out of bounds."""
    params = pltpu.InterpretParams(uninitialized_memory="nan")
    monkeypatch.setattr(ragged, "INTERPRET", params)
    arrays, start_B = decode_case(K=1, H=H, starts=[0, 130, 250])
    for column in (0, 251):
        at = (arrays, 1, start_B, column)
        np.testing.assert_allclose(decode("ragged")(*at), decode("xla")(*at), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shape", MESHES)
@pytest.mark.parametrize("backend", ["xla", "ragged"])
def test_a_mesh_changes_no_decoding(shape, backend, on_cpu):
    arrays, start_B = decode_case(K=4)
    here = decode(backend)(arrays, 1, start_B, 200)
    mesh = sharding.make_mesh(*shape)
    with jax.set_mesh(mesh):
        laid = lay(arrays, mesh, "BQH BKH BKH LBKSH LBKSH")
        there = decode(backend)(laid, 1, start_B, 200)
        assert there.sharding.is_equivalent_to(sharding.activation(mesh, "BQH"), 3)
    np.testing.assert_allclose(there, here, rtol=1e-5, atol=1e-6)


def test_decoding_is_the_last_column_of_whole_rows():
    q, k, v, start_B = causal_case(9, 9, K=2, G=3)
    whole = run((q, k, v, start_B), "xla")
    pad = lambda x: jnp.pad(x[None], [(0, 0)] * 3 + [(0, 4), (0, 0)], constant_values=7.0)
    arrays = [q[:, 8], k[:, :, 8], v[:, :, 8], pad(k), pad(v)]
    np.testing.assert_allclose(
        decode("xla")(arrays, 0, start_B, 8), whole[:, 8], rtol=1e-5, atol=1e-6
    )


# which


@pytest.mark.parametrize(
    "value, platform, dtype, head_size, pair",
    [
        ("auto", "cpu", "float32", 128, ("xla", "xla")),
        ("auto", "tpu", "bfloat16", 128, ("splash", "ragged")),
        ("auto", "tpu", "float32", 64, ("splash", "ragged")),
        ("auto", "tpu", "bfloat16", 256, ("splash", "ragged")),
        ("auto", "tpu", "bfloat16", 80, ("xla", "xla")),
        ("auto", "gpu", "bfloat16", 128, ("cudnn", "xla")),
        ("auto", "cuda", "float16", 8, ("cudnn", "xla")),
        ("auto", "gpu", "float32", 128, ("xla", "xla")),
        ("auto", "gpu", "bfloat16", 132, ("xla", "xla")),
        ("auto", "gpu", "bfloat16", 136, ("xla", "xla")),
        ("xla", "tpu", "bfloat16", 128, ("xla", "xla")),
        ("splash", "tpu", "bfloat16", 128, ("splash", "ragged")),
        ("cudnn", "gpu", "bfloat16", 64, ("cudnn", "xla")),
    ],
)
def test_resolve(value, platform, dtype, head_size, pair):
    assert resolve(value, platform, jnp.dtype(dtype), head_size) == pair


@pytest.mark.parametrize(
    "value, platform, head_size, pair",
    [
        ("auto", "tpu", 128, ("splash", "ragged")),
        ("auto", "tpu", 80, ("xla", "xla")),
        ("xla", "tpu", 128, ("xla", "xla")),
        ("auto", "gpu", 128, ("xla", "xla")),
        ("auto", "cpu", 128, ("xla", "xla")),
    ],
)
def test_resolve_for_packed_rows(value, platform, head_size, pair):
    assert resolve(value, platform, jnp.bfloat16, head_size, packed=True) == pair
    assert attention.packs_whole(pair[0]) == (pair[0] == "splash")


def test_cudnn_knows_no_packed_rows():
    with pytest.raises(UserError, match="knows no packed rows, and learn.pack is set: set it to"):
        resolve("cudnn", "gpu", jnp.bfloat16, 128, packed=True)


@pytest.mark.parametrize(
    "value, platform, dtype, head_size, sentence",
    [
        ("splash", "cpu", "float32", 128, "needs a TPU and this is a cpu"),
        ("splash", "tpu", "bfloat16", 80, "takes head sizes that 64 divides and the model's is 80"),
        ("cudnn", "tpu", "bfloat16", 128, "needs an NVIDIA GPU and this is a tpu"),
        ("cudnn", "gpu", "float32", 128, "needs model.dtype bfloat16 and it is float32"),
        ("cudnn", "gpu", "bfloat16", 256, "up to 128 that 8 divides and the model's is 256"),
    ],
)
def test_an_attention_that_cannot_run_says_why(value, platform, dtype, head_size, sentence):
    with pytest.raises(UserError) as error:
        resolve(value, platform, jnp.dtype(dtype), head_size)
    text = str(error.value)
    assert text.startswith(f"model.attention is '{value}', which ") and sentence in text
    assert text.endswith(": set it to auto or to xla")


def test_the_config_offers_these_attentions():
    assert list(ATTENTION) == choices.CHOICES["model.attention"]


def test_an_unknown_attention_is_named():
    with pytest.raises(UserError, match="is 'flash': it must be one of auto, xla, splash, cudnn"):
        resolve("flash", "tpu", jnp.bfloat16, 128)


# compiled for a TPU


@needs_libtpu
@pytest.mark.parametrize(
    "topology, mesh", [("v5e:2x2", "1,2,2"), ("v5e:4x4", "1,4,4"), ("v6e:2x2", "1,2,2")]
)
def test_kernels_compile_for_tpu(topology, mesh):
    found = reports("tpu_attention.py", topology, mesh)
    assert sum(r["name"].startswith("splash 7B") for r in found) == 2
    assert sum(r["name"].startswith("ragged 7B") for r in found) == 2
    for r in found:
        assert not r["collectives"], r
        if r["name"].startswith("splash"):
            assert r["kernels"] == 3, r  # forward, dq, dk and dv
        else:  # the cache is most of the arguments, and is copied nowhere
            assert r["kernels"] == 1 and r["temporaries"] < r["arguments"] / 8, r
