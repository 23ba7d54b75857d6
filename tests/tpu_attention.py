"""Compiles attention for TPUs that are not here, and prints what XLA says as a line of JSON each.

Run by test_attention.py in a process of its own: libtpu reads its settings from the environment.
    JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 ALLOW_MULTIPLE_LIBTPU_LOAD=1 JAX_OPTIMIZATION_LEVEL=O0 \
        PYTHONPATH=. python tests/tpu_attention.py v5e:2x2 1,2,2
"""

import sys

import jax
import jax.numpy as jnp
from ahead_of_time import report

from fgrpo_jax import accelerators, programs, sharding
from fgrpo_jax.attention import causal_attention, decode_attention

HEADS = {"7B": (28, 4, 128), "0.5B": (14, 2, 64)}  # Q, K, H of Qwen2.5
B, L = 16, 3


def lower(mesh, function, arguments, axes, donate=()):
    shapes = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=sharding.activation(mesh, axis))
        for (shape, dtype), axis in zip(arguments, axes, strict=True)
    ]
    with jax.set_mesh(mesh):
        return jax.jit(function, donate_argnums=donate).lower(*shapes)


def causal(name, mesh, T, S, backend="splash", heads=None):
    Q, K, H = heads or HEADS[name]

    def loss(q_BTQH, k_BKSH, v_BKSH, start_B):
        out_BTQH = causal_attention(q_BTQH, k_BKSH, v_BKSH, start_B, backend)
        return (out_BTQH.astype(jnp.float32) ** 2).sum()

    bf16 = jnp.bfloat16
    arguments = [((B, T, Q, H), bf16), *[((B, K, S, H), bf16)] * 2, ((B,), jnp.int32)]
    axes = ("BTQH", "BKSH", "BKSH", "B")
    label = f"{backend} {name} T={T} S={S}"
    report(label, lower(mesh, jax.grad(loss, (0, 1, 2)), arguments, axes))


def decode(name, mesh, S, dtype=jnp.bfloat16, backend="ragged", heads=None):
    """The sampler's loop: layers read the cache in a scan, new rows are written after it."""
    Q, K, H = heads or HEADS[name]

    def loop(q_BQH, k_LBKSH, v_LBKSH, start_B):
        def token(carry):
            q_BQH, k_LBKSH, v_LBKSH, column = carry

            def layer(q_BQH, index):
                k_BKH = q_BQH.reshape(B, K, Q // K, H).sum(2)
                out_BQH = decode_attention(
                    q_BQH,
                    k_BKH,
                    k_BKH,
                    k_LBKSH,
                    v_LBKSH,
                    index,
                    start_B,
                    column,
                    k_LBKSH.shape[3],
                    backend,
                )
                return out_BQH, k_BKH

            q_BQH, k_LBKH = jax.lax.scan(layer, q_BQH, jnp.arange(L))
            write = lambda x_LBKSH: jax.lax.dynamic_update_slice_in_dim(
                x_LBKSH, k_LBKH[:, :, :, None], column, axis=3
            )
            return q_BQH, write(k_LBKSH), write(v_LBKSH), column + 1

        start = (q_BQH, k_LBKSH, v_LBKSH, jnp.int32(S // 2))
        return jax.lax.while_loop(lambda carry: carry[3] < S, token, start)[:3]

    arguments = [((B, Q, H), dtype), *[((L, B, K, S, H), dtype)] * 2, ((B,), jnp.int32)]
    label = f"{backend} {name} S={S} {jnp.dtype(dtype).name}"
    report(label, lower(mesh, loop, arguments, ("BQH", "LBKSH", "LBKSH", "B"), donate=(1, 2)))


def main(topology, axes):
    devices = programs.devices(accelerators.topology(topology))
    auto = (jax.sharding.AxisType.Auto,) * 3
    mesh = jax.make_mesh(
        tuple(map(int, axes.split(","))), sharding.AXES, axis_types=auto, devices=devices
    )
    for name, (_, K, _) in HEADS.items():
        if K % mesh.shape["tp"]:
            continue
        causal(name, mesh, 1024, 1024)
        causal(name, mesh, 300, 1100)
        decode(name, mesh, 4096)
        decode(name, mesh, 1152, jnp.float32)


if __name__ == "__main__":
    main(*sys.argv[1:])
