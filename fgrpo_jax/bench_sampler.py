"""What sampling costs: a random Qwen2 of any shape, against what its matmuls and a copy take."""

import argparse
import dataclasses
import json
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fgrpo_jax import UserError, attention, sharding, weights
from fgrpo_jax.layers import multiply
from fgrpo_jax.layout import Layout, SamplerSettings, cache_bytes
from fgrpo_jax.model import DTYPES, Cache, Policy
from fgrpo_jax.model_config import ModelConfig
from fgrpo_jax.sampler import make_sampler
from fgrpo_jax.sampling import Sampling
from fgrpo_jax.slots import make_programs
from fgrpo_jax.structs import Prompts, Response
from fgrpo_jax.timing import ceilings, peak_rss, timed


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model and what is asked of it."""

    layers: int = 4
    hidden: int = 256
    intermediate: int = 1024
    heads: int = 8
    kv_heads: int = 2
    vocab: int = 4096
    dtype: str = "float32"
    prompts: int = 4
    samples: int = 8
    prompt: int = 64  # tokens
    response: int = 128  # tokens, at most
    median: float = 0.0  # of log-normal lengths; 0: every response is as long as may be
    sigma: float = 0.8  # of their logarithms
    slots: int = 1 << 20
    chunk: int = 64
    unroll: bool = True


SHAPES = {
    "reference": Shape(),
    "realistic": Shape(prompts=32, slots=32, median=32.0),
    "smollm2_135m": Shape(
        layers=30, hidden=576, intermediate=1536, heads=9, kv_heads=3, vocab=49152, prompts=8
    ),
}
FLAGS: dict[str, dict[str, Any]] = {  # add_argument's, by field
    field.name: {"action": argparse.BooleanOptionalAction}
    if field.type is bool
    else {"choices": sorted(DTYPES)}
    if field.name == "dtype"
    else {"type": type(field.default)}
    for field in dataclasses.fields(Shape)
}
STOP = 0  # the only stop token


@dataclasses.dataclass(frozen=True)
class Mortal(Policy):
    """A policy of random weights whose token t is the stop token with probability hazard[t]: so
    the lengths of responses have any distribution. The first feature carries t."""

    prompt: int = 0
    hazard: tuple[float, ...] = ()

    def prefill(self, params, token_BT, start_B, cache=None):
        hidden_BD, cache = super().prefill(params, token_BT, start_B, cache)
        return hidden_BD.at[:, 0].set(0), cache

    def decode(self, params, token_B, start_B, column, cache: Cache, width=None):
        hidden_BD, cache = super().decode(params, token_B, start_B, column, cache, width)
        age_B = (column + 1 - start_B - self.prompt).astype(hidden_BD.dtype)
        return hidden_BD.at[:, 0].set(age_B), cache

    def logits(self, params, hidden, temperature):
        t_B = jnp.clip(hidden[:, 0].astype(jnp.int32), 0, len(self.hazard) - 1)
        logits_BV = super().logits(params, hidden.at[:, 0].set(0), temperature)
        odds = np.array(self.hazard, np.float32) / (1 - np.array(self.hazard, np.float32))
        # the other tokens' logits are near 0, so that their odds add up to about V - 1
        stop_B = jnp.log(jnp.asarray(odds * (self.config.vocab - 1)))[t_B]
        return logits_BV.at[:, STOP].set(stop_B)


def hazards(median: float, sigma: float, longest: int) -> tuple[float, ...]:
    """P(length = t + 1 | length > t) of a log-normal length rounded up, t = 0 .. longest - 1."""
    survival = lambda t: 0.5 * math.erfc(math.log(t / median) / (sigma * math.sqrt(2))) if t else 1
    return tuple(min(1 - survival(t + 1) / survival(t), 0.999) for t in range(longest))


def step_cost(config: ModelConfig, rows: int, columns: float, itemsize: int) -> tuple[float, float]:
    """FLOP and bytes of a decode step by formula: matmuls and attention of so many rows and
    columns; weights and cache read once."""
    c = config
    matmuls = c.layers * c.layer_matrices + c.vocab * c.width
    scores = 2 * c.layers * c.heads * c.head_size * columns
    cache = c.column_bytes(itemsize) * columns
    return 2.0 * rows * (matmuls + scores), itemsize * matmuls + rows * cache


def matmuls_alone(params: Any, x_BD: jax.Array) -> jax.Array:
    """The matmuls of a decode step and nothing else, each with a result that is used."""
    x_BTD = x_BD[:, None]
    for block in params["layers"]:
        attention, mlp = block["self_attn"], block["mlp"]
        weight = {name: part["weight"][0] for name, part in (attention | mlp).items()}
        q_BTQH = multiply("BTD,QHD->BTQH", x_BTD, weight["q_proj"])
        k_BTKH = multiply("BTD,KHD->BTKH", x_BTD, weight["k_proj"])
        v_BTKH = multiply("BTD,KHD->BTKH", x_BTD, weight["v_proj"])
        x_BTD = multiply("BTQH,DQH->BTD", q_BTQH, weight["o_proj"]) + k_BTKH.sum() + v_BTKH.sum()
        gate_BTF = multiply("BTD,FD->BTF", x_BTD, weight["gate_proj"])
        up_BTF = multiply("BTD,FD->BTF", x_BTD, weight["up_proj"])
        x_BTD = multiply("BTF,DF->BTD", gate_BTF + up_BTF, weight["down_proj"])
    return multiply("BD,VD->BV", x_BTD[:, 0], params["embed_tokens"]["weight"])


def run(shape: str, repeats: int, **changes: Any) -> None:
    """Prints one JSON object."""
    changes = {name: value for name, value in changes.items() if value is not None}
    print(json.dumps(measure(dataclasses.replace(SHAPES[shape], **changes), repeats), indent=1))


def check(x: Shape) -> None:
    """UserError where a shape cannot be."""
    for field in dataclasses.fields(x):
        value = getattr(x, field.name)
        if field.type is int and value < 1:
            raise UserError(f"--{field.name} is {value}: it must be above 0")
    if x.prompts % jax.device_count():
        raise UserError(
            f"--prompts is {x.prompts}: it must be a multiple of the {jax.device_count()} devices"
        )
    if x.hidden % x.heads or x.heads % x.kv_heads:
        raise UserError(
            f"hidden {x.hidden}, heads {x.heads}, kv_heads {x.kv_heads}: each must be a multiple "
            "of the next"
        )


def make_policy(x: Shape) -> Policy:
    config = ModelConfig(
        x.vocab, x.hidden, x.layers, x.heads, x.kv_heads, x.hidden // x.heads, x.intermediate,
        1e6, 1e-6, tied=True,
    )  # fmt: skip
    dtype = DTYPES[x.dtype]()
    backends = attention.resolve("auto", jax.default_backend(), dtype, config.head_size)
    policy: Policy = Policy(config, dtype, backends=backends)
    if x.median:
        hazard = hazards(x.median, x.sigma, x.response)
        policy = Mortal(config, dtype, backends=backends, prompt=x.prompt, hazard=hazard)
    return policy


def prompts_of(x: Shape) -> Prompts:
    random = np.random.default_rng(0)
    tokens_PC = random.integers(1, x.vocab, (x.prompts, x.prompt)).astype(np.int32)
    positions = np.arange(x.prompts, dtype=np.int32)
    return Prompts(tokens_PC, np.full(x.prompts, x.prompt, np.int32), positions, ())


def measure(x: Shape, repeats: int) -> dict[str, Any]:
    check(x)
    policy = make_policy(x)
    settings = SamplerSettings(
        x.samples,
        x.response,
        Sampling(),
        (STOP if x.median else x.vocab,),
        chunk=x.chunk,
        slots=x.slots,
    )
    mesh = sharding.make_mesh(1, jax.device_count(), 1)
    with jax.set_mesh(mesh):
        unstack = weights.make_decode_params(policy, mesh, unroll=True)
        params = unstack(jax.jit(policy.init)(jax.random.key(0)))
        unrolled = params
        if not x.unroll:
            params = weights.make_decode_params(policy, mesh)(
                jax.jit(policy.init)(jax.random.key(0))
            )
        return _measure(x, repeats, policy, settings, params, unrolled)


def _measure(
    x: Shape, repeats: int, policy: Policy, settings: SamplerSettings, params: Any, unrolled: Any
) -> dict[str, Any]:
    prompts = prompts_of(x)
    key = jax.random.key(0, impl="threefry2x32")
    layout = Layout.of(settings, x.prompts, x.prompt, policy.backends[1] == "ragged")
    rows = layout.shards * layout.slots
    stream = make_sampler(policy, settings)
    progress: list[tuple[int, ...]] = []

    def call() -> list[list[Response]]:
        return list(stream(params, prompts, key, lambda *numbers: progress.append(numbers)))

    programs = make_programs(policy, settings)
    slots, room = programs.empty(params, layout)
    size = layout.shards * layout.group
    group = [a[:size] for a in (prompts.tokens_PC, prompts.length_P, prompts.position_P)]
    before = time.perf_counter()
    decode = programs.decode.lower(
        params, slots, room, np.int32(0), np.int32(x.prompt), key, np.zeros(rows, bool),
        np.int32(1), width=layout.widths[-1],
    ).compile()  # fmt: skip
    compile_s = time.perf_counter() - before
    memory = decode.memory_analysis()
    weight_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))

    def prefill() -> Any:
        nonlocal room
        room = programs.prefill(params, room, *group, np.int32(0))
        return room.hidden_PD

    x_BD = jnp.ones((rows, x.hidden), policy.dtype)
    matmuls = jax.jit(matmuls_alone)
    before = time.perf_counter()
    responses = [response for some in call() for response in some]
    first_call_s = time.perf_counter() - before
    steps, tokens = progress[-1][3], progress[-1][2]
    lengths = np.array([len(response.tokens) for response in responses])
    times = timed(
        {"call": call, "prefill": prefill, "matmuls": lambda: matmuls(unrolled, x_BD)}, repeats
    )
    groups = -(-layout.prompts // layout.group)
    (call_cpu, call_wall), (prefill_cpu, prefill_wall) = times["call"], times["prefill"]
    decode_cpu = (call_cpu - groups * prefill_cpu) / steps
    decode_wall = (call_wall - groups * prefill_wall) / steps
    limits = ceilings(dtype=policy.dtype)
    columns = x.prompt + lengths.mean() / 2
    flop, moved = step_cost(policy.config, rows, columns, jnp.dtype(policy.dtype).itemsize)
    prompt_tokens = layout.shards * layout.group * x.prompt
    return {
        "shape": dataclasses.asdict(x),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "attention": policy.backends,
        "parameters": weight_bytes // jnp.dtype(policy.dtype).itemsize,
        "tokens": tokens,
        "mean_length": float(lengths.mean()),
        "steps": steps,
        "slots": rows,
        "slots_busy": tokens / (steps * rows),
        "call_cpu_s": call_cpu,
        "call_wall_s": call_wall,
        "tokens_per_cpu_s": tokens / call_cpu,
        "tokens_per_s": tokens / call_wall,
        "prefill_cpu_s": groups * prefill_cpu,
        "prefill_tokens_per_cpu_s": prompt_tokens / prefill_cpu,
        "prefill_tokens_per_s": prompt_tokens / prefill_wall,
        "decode_cpu_ms": 1e3 * decode_cpu,
        "decode_wall_ms": 1e3 * decode_wall,
        "decode_tokens_per_s": tokens / (steps * decode_wall),
        "matmuls_cpu_ms": 1e3 * times["matmuls"][0],
        "decode_over_matmuls": decode_cpu / times["matmuls"][0],
        "step_gflop": flop / 1e9,
        "step_mb": moved / 1e6,
        **limits,
        "share_of_matmul_ceiling": flop / 1e9 / limits["matmul_gflop_per_cpu_s"] / decode_cpu,
        "share_of_copy_ceiling": moved / 1e9 / limits["copy_gb_per_cpu_s"] / decode_cpu,
        "compile_s": compile_s,
        "first_call_s": first_call_s,
        "cache_bytes": cache_bytes(policy, layout),
        "cache_bytes_held": memory.argument_size_in_bytes - weight_bytes,
        "decode_temporary_bytes": memory.temp_size_in_bytes,
        "peak_rss_bytes": peak_rss(),
    }
