"""Compiles the sampler's programs of Qwen2.5-7B for TPUs that are not here, and prints what XLA
says as a line of JSON each.

Run by test_sampler.py in a process of its own: libtpu reads its settings from the environment.
    JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 ALLOW_MULTIPLE_LIBTPU_LOAD=1 JAX_OPTIMIZATION_LEVEL=O0 \
        PYTHONPATH=. python tests/tpu_sampler.py v5e:4x4 1,4,4 xla,xla
"""

import json
import re
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies

from fgrpo_jax import sharding
from fgrpo_jax.layout import Layout, SamplerSettings, cache_bytes
from fgrpo_jax.model import ModelConfig, Policy
from fgrpo_jax.sampling import Sampling
from fgrpo_jax.slots import make_programs

QWEN_7B = ModelConfig(152064, 3584, 28, 28, 4, 128, 18944, 1e6, 1e-6, tied=False)
COLLECTIVE = re.compile(
    r"= (\S+) (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)
BYTES = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2, "pred": 1, "s8": 1, "u8": 1}


def size(shape):
    """Bytes of an HLO shape such as bf16[64,1,3584]{...} or a tuple of them."""
    total = 0
    for kind, dims in re.findall(r"(\w+)\[([\d,]*)\]", shape):
        total += BYTES[kind] * int(np.prod([int(d) for d in dims.split(",") if d] or [1]))
    return total


def report(name, program, *arguments, **static):
    before = time.time()
    compiled = program.lower(*arguments, **static).compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    collectives = sorted((kind, size(shape)) for shape, kind in COLLECTIVE.findall(text))
    print(
        json.dumps(
            dict(
                name=name,
                seconds=round(time.time() - before, 1),
                temporaries=memory.temp_size_in_bytes,
                arguments=memory.argument_size_in_bytes,
                aliased=memory.alias_size_in_bytes,
                peak=memory.peak_memory_in_bytes,
                collectives=collectives,
            )
        ),
        flush=True,
    )


def main(
    topology,
    axes,
    backends,
    sampling="",
    samples=8,
    prompts=256,
    columns=1024,
    response=3072,
    slots=256,
):
    devices = topologies.get_topology_desc(topology, platform="tpu").devices
    mesh = jax.sharding.Mesh(
        np.array(devices).reshape(tuple(map(int, axes.split(",")))),
        sharding.AXES,
        axis_types=(jax.sharding.AxisType.Auto,) * 3,
    )
    policy = Policy(QWEN_7B, jnp.bfloat16, tokens=151665, backends=tuple(backends.split(",")))
    s = SamplerSettings(
        samples,
        response,
        Sampling(top_k=20, top_p=0.95) if sampling else Sampling(),
        (151645, 151643),
        slots=slots,
    )
    key = jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32"))
    shapes = jax.eval_shape(policy.init, key)
    with jax.set_mesh(mesh):
        programs = make_programs(policy, s)
        layout = Layout.of(s, prompts, columns, policy.backends[1] == "ragged")
        of = lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, policy.dtype), shapes)
        params = jax.tree.map(of, shapes, sharding.state_shardings(mesh, shapes, "decode"))
        rows = lambda *shape, kind=jnp.int32: jax.ShapeDtypeStruct(
            shape, kind, sharding=sharding.activation(mesh, "BT"[: len(shape)])
        )
        slots_and_room = jax.eval_shape(lambda p: programs.empty(p, layout), params)
        slots, room = (
            jax.tree.map(
                lambda x: of(
                    x, sharding.activation(mesh, "LBKSH" if x.ndim == 5 else "BT"[: x.ndim])
                ),
                tree,
            )
            for tree in slots_and_room
        )
        number = jax.ShapeDtypeStruct((), jnp.int32)
        ended = rows(layout.shards * layout.slots, kind=bool)
        print(json.dumps(dict(cache=cache_bytes(policy, layout) // len(devices))), flush=True)
        width = layout.widths[-1]
        args = (params, slots, room, number, number, key, ended, number)
        report("decode", programs.decode, *args, width=width)
        report("move_back", programs.move_back, slots, number)
        group = layout.shards * layout.group
        report(
            "prefill",
            programs.prefill,
            params,
            room,
            rows(group, columns),
            rows(group),
            rows(group),
            number,
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
