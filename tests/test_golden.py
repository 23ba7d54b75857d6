"""What XLA makes of a step's programs on eight devices: what they move, hold and give back.

A CPU's programs are partitioned as a TPU's are, so that what travels is the same; how fast, and
what is fused, is not. The bounds are formulas of the shapes: a program may do better.
"""

import contextlib
import dataclasses
import functools
import io
import json
import math
import os
import pathlib
import re
import sys
import tempfile

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console

from fgrpo_jax import config, hlo, metrics, programs, sharding, train, update
from fgrpo_jax.accelerators import Chip, Topology
from fgrpo_jax.model import Policy

TINY = str(pathlib.Path(__file__).parents[1] / "configs" / "tiny_arithmetic_focal.py")
PRIME = 631  # no size but the vocabulary's has this divisor
L, D, F, V = 2, 32, 96, 8 * PRIME
P, N, C, T = 16, 4, 24, 64  # prompts, samples of each, prompt columns, response tokens
MINIBATCHES, MICROBATCHES, ROWS = 2, 2, 16  # rows of a microbatch, over all devices
CHUNK, SLOTS = 16, 32  # response tokens whose logits are in memory; rows that decode
FLOAT = 4  # bytes
QUICKLY = {"xla_backend_optimization_level": 0}  # LLVM's, which changes none of what is read here
SAMPLING = "decode_params prefill decode move_back".split()


@contextlib.contextmanager
def compiler_said():
    """What is written to file descriptor 2, where XLA's C++ code writes: a list, filled at the
    end. Nothing comes from the compilation cache, for that would have nothing to say."""
    enabled = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    sys.stderr.flush()
    before, lines = os.dup(2), []
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            os.dup2(before, 2)
            os.close(before)
            jax.config.update("jax_enable_compilation_cache", enabled)
            compilation_cache.reset_cache()
            file.seek(0)
            lines += file.read().decode(errors="replace").splitlines()


def rematerialised(lines):
    """XLA's complaints that it must make an array whole on every device to lay it out anew."""
    return [line for line in lines if "nvoluntary full rematerialization" in line]


def build(folder, n, tp, tied, *overrides, vocab=V, width=D):
    """programs.build of a small model on n of this process's devices."""
    shape = dict(
        model_type="qwen2", architectures=["Qwen2ForCausalLM"], hidden_act="silu",
        vocab_size=vocab, hidden_size=width, num_hidden_layers=L, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=F, rope_theta=1e4, rms_norm_eps=1e-6,
        tie_word_embeddings=tied, max_position_embeddings=512,
    )  # fmt: skip
    (folder / "config.json").write_text(json.dumps(shape))
    settings = {
        "model.path": folder, "model.dtype": "float32", "model.remat": "full", "mesh.tp": tp,
        "rollout.prompts": P, "algo.group_size": N, "learn.minibatch": P // MINIBATCHES,
        "learn.microbatch": ROWS, "learn.logit_chunk": CHUNK, "rollout.max_response": T,
        "data.max_prompt": C, "rollout.slots": SLOTS, "rollout.chunk": 16, "kl.coef": 0.1,
    }  # fmt: skip
    overrides = [*(f"{key}={value}" for key, value in settings.items()), *overrides]
    here = Topology(f"cpu:{n}", Chip("cpu", "cpu", 1.0, 0.05, 10.0), (n,))
    return programs.build(config.load(TINY, overrides), here, T // 2, jax.devices()[:n])


@dataclasses.dataclass
class Step:
    """All programs of a step, compiled."""

    fsdp: int
    tp: int
    built: programs.Built
    compiled: dict
    said: list

    def collectives(self, name):
        return list(hlo.each_collective(self.compiled[name].as_text()))

    @property
    def learning(self):
        return [name for name in self.compiled if name not in SAMPLING]


@pytest.fixture(scope="module", params=[2, 1], ids=["fsdp 4, tp 2", "fsdp 8"])
def step(request, tmp_path_factory):
    """As a 7B model (head of its own, layers scanned while decoding) where tp is 2, and as a
    0.5B model (tied, unrolled) on a mesh of fsdp alone."""
    tp, unroll = request.param, "no" if request.param == 2 else "yes"
    folder = tmp_path_factory.mktemp("model")
    built = build(folder, 8, tp, tp == 1, f"rollout.unroll={unroll}")
    with compiler_said() as said:
        compiled = {name: lower().compile(QUICKLY) for name, lower in built.programs.items()}
    return Step(8 // tp, tp, built, compiled, said)


def dims(shape):
    """Of the arrays of an HLO shape."""
    found = re.findall(r"\b[a-z]+\d*\w*\[([\d,]*)\]", shape)
    return [tuple(int(d) for d in each.split(",") if d) for each in found]


def over_vocabulary(shape):
    return any(d % PRIME == 0 for each in dims(shape) for d in each)


# what travels


def test_the_decode_loop_moves_hidden_states_alone(step):
    """Twice a layer and once more a token at most, and beside them some numbers a row, by which the
    devices of tp agree on the token; on fsdp alone whether any row is alive, and no more."""
    rows, loops = SLOTS // step.fsdp, [x for x in step.collectives("decode") if x.looped]
    assert loops and not any(over_vocabulary(x.shape) for x in loops)
    if step.tp == 1:
        assert {x.kind for x in loops} == {"all-reduce"}
        assert max(x.bytes for x in loops) <= 8
        return
    hidden = rows * D * FLOAT
    # XLA joins a hidden state with the numbers of rows that are reduced at the same time
    assert max(x.bytes for x in loops if x.kind == "all-reduce") <= hidden + 4 * rows * FLOAT
    assert max(x.bytes for x in loops if x.kind != "all-reduce") <= 2 * step.tp * rows * FLOAT
    assert sum(x.times for x in loops if x.bytes >= hidden) <= 1 + 2 * L


def test_prefill_moves_hidden_states_alone(step):
    """After the embedding, attention and MLP: all weights are where they are needed."""
    moved = step.collectives("prefill")
    if step.tp == 1:
        assert not moved
        return
    assert {x.kind for x in moved} == {"all-reduce"}
    assert max(x.bytes for x in moved) <= P // step.fsdp * C * D * FLOAT
    assert sum(x.times for x in moved) <= 1 + 2 * L


def test_weights_are_gathered_once_for_decoding(step):
    moved, parts = step.collectives("decode_params"), step.built.parts
    assert {x.kind for x in moved} == {"all-gather"}
    assert sum(x.times * x.bytes for x in moved) <= parts["decode weights"]


def test_moving_the_cache_back_moves_nothing_between_devices(step):
    assert not step.collectives("move_back")


def test_learning_gathers_a_weight_at_a_time(step):
    """And hidden states of a microbatch. Of what has the vocabulary's size, only tables travel:
    never logits."""
    table = (V // step.tp, D)
    weight = FLOAT * F * D // step.tp
    hidden = FLOAT * ROWS * (C + T) * D
    for name in step.learning:
        moved = step.collectives(name)
        assert {x.kind for x in moved} <= {"all-reduce", "all-gather", "reduce-scatter"}, name
        for x in moved:
            if over_vocabulary(x.shape):
                assert all(d == table for d in dims(x.shape) if len(d) > 1), x.line
            elif x.kind == "all-gather":
                assert x.bytes <= max(weight, hidden), x.line


def reductions(step, *shape):
    """How often an update reduces arrays of a shape, in any order of the axes, over devices."""
    return sum(
        x.times * sum(sorted(d for d in each if d > 1) == sorted(shape) for each in dims(x.shape))
        for x in step.collectives("update")
        if x.kind in ("all-reduce", "reduce-scatter")
    )


def test_gradients_are_reduced_once_a_microbatch(step):
    """A layer's when its backward pass ends: no gradient is ever held whole. Prompts and responses
    are two passes over a layer, and XLA for a CPU reduces each, for a TPU their sum; the head's is
    reduced after each chunk of logits, on a TPU too."""
    micros = MINIBATCHES * MICROBATCHES
    matrices = reductions(step, F // step.tp, D)
    assert 3 * L * micros <= matrices <= 2 * 3 * L * micros
    tables = reductions(step, V // step.tp, D)
    assert micros <= tables <= (T // CHUNK + 2) * micros


# what is held


def test_no_array_of_all_logits(step):
    """The largest array that is made has a chunk's logits of a device's rows and vocabulary."""
    logits = FLOAT * ROWS // step.fsdp * CHUNK * V // step.tp
    table = FLOAT * V // step.tp * D
    assert max(logits, table) <= logits * T // CHUNK / 2
    for name in step.learning:
        size, line = hlo.largest(step.compiled[name].as_text())
        assert size <= max(logits, table), line
    decoded = FLOAT * max(SLOTS // step.fsdp, D) * V // step.tp
    for name in ("prefill", "decode"):
        size, line = hlo.largest(step.compiled[name].as_text())
        assert size <= 1.1 * decoded, line  # with padding


def test_what_is_given_is_given_back(step):
    """State, slots and waiting prompts are donated: each byte of them is an output's."""
    parts, arguments = step.built.parts, step.built.arguments
    aliased = {name: x.memory_analysis().alias_size_in_bytes for name, x in step.compiled.items()}
    assert aliased["update"] == arguments["update"] - parts["batch"]
    assert aliased["update"] >= parts["parameters"] + parts["optimizer"]
    assert aliased["decode"] == aliased["move_back"] == parts["slots"]
    assert aliased["prefill"] == parts["cache"] - parts["slots"]


@pytest.mark.parametrize("axes", [(1, 4, 2), (1, 8, 1), (1, 2, 4)])
@pytest.mark.parametrize("name", ["Qwen2.5-0.5B", "Qwen2.5-7B"])
def test_nothing_large_is_replicated(name, axes):
    """Of a real model's state, every array of more than 64 Ki elements a layer is shared by all
    devices; what is not shared is less than a thousandth."""
    mesh = sharding.make_mesh(*axes)
    m = programs.model_shape(name)
    if m.kv_heads % axes[2]:
        pytest.skip("its key heads do not divide")
    state = update.abstract_state(Policy(m), optax.adamw(1e-3), mesh)
    whole, share = 0, 0
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        layers = m.layers if "layers/" in sharding.path_name(path) else 1
        here = math.prod(x.sharding.shard_shape(x.shape))
        whole, share = whole + x.size, share + here
        if x.size // layers > 2**16:
            assert here * mesh.size == x.size, sharding.path_name(path)
    assert share < 1.001 * whole / mesh.size + 0.001 * whole


# what the partitioner says


def test_no_involuntary_rematerialisation(step):
    assert not rematerialised(step.said)


def test_an_involuntary_rematerialisation_is_seen():
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    place = lambda *axes: NamedSharding(mesh, PartitionSpec(*axes))
    one, other = place("y", None, "x"), place(None, ("x", "y"), None)
    x = lambda where: jax.ShapeDtypeStruct((16, 16, 16), jnp.float32, sharding=where)
    bad = jax.jit(lambda a, b, c: c + jax.lax.with_sharding_constraint(a + b, other))
    with compiler_said() as said:
        bad.lower(x(one), x(one), x(other)).compile()
    assert rematerialised(said)
    with compiler_said() as said:
        jax.jit(lambda a, b: a + b).lower(x(one), x(one)).compile()
    assert not rematerialised(said)


# how often it compiles


def test_no_step_after_the_second_compiles(tmp_path, monkeypatch):
    """Rollout, rewards, update and bookkeeping, on a mesh, evaluation and checkpoints aside."""
    settings = (
        "mesh.tp=2 steps=4 rollout.prompts=8 algo.group_size=4 learn.minibatch=4 score.workers=1 "
        "rollout.max_response=12 rollout.chunk=6 rollout.slots=16 eval.every=0 eval.problems=2 "
        "eval.samples=1 optim.decay_start=0 optim.decay_end=0 checkpoint.every=99"
    ).split()
    seen = []

    def listener(event, duration, fun_name="", **_):
        if "backend_compile" in event:
            seen.append(fun_name)

    class Journal(metrics.Journal):
        def write(self, record):
            super().write(record)
            if "loss" in record:
                seen.append(record["step"])

    monkeypatch.setattr(metrics, "Journal", Journal)
    monkeypatch.setattr(jax, "device_count", lambda: 4)  # compiles in less time than for eight
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        train.train(config.load(TINY, settings), tmp_path / "run", Console(file=io.StringIO()))
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    assert "jit(update)" in seen[: seen.index(1)]
    assert seen[seen.index(2) : seen.index(4) + 1] == [2, 3, 4]


# memory against vocabulary, tokens and microbatches

REAL = 151_936  # Qwen2.5's vocabulary
WIDE = 64  # of the model


@pytest.fixture(scope="module")
def temporaries(tmp_path_factory):
    """Of an update on one device: so many response tokens, and microbatches of four rows."""
    folder = tmp_path_factory.mktemp("real")

    def size(response, micros):
        settings = (
            f"rollout.prompts={micros} learn.minibatch={micros} learn.microbatch={N} kl.coef=0 "
            f"rollout.max_response={response} learn.logit_chunk={CHUNK}"
        ).split()
        built = build(folder, 1, 1, True, *settings, vocab=REAL, width=WIDE)
        return built.programs["update"]().compile(QUICKLY).memory_analysis().temp_size_in_bytes

    return functools.cache(size)


def test_memory_does_not_grow_with_vocabulary_times_tokens(temporaries):
    """Twice the tokens, all beyond a chunk, take what hidden states take: a few arrays of each
    layer's widths a token, as those were kept for the backward pass, and its attention scores."""
    short, long = temporaries(64, 2), temporaries(128, 2)
    logits = N * 64 * REAL * FLOAT  # 156 MB: of the tokens more
    assert long - short < 0.05 * logits
    # by hand: 64 tokens more of 4 rows; L + 4 hidden states of D, 6 of F, scores of 4 heads
    # against C + 128 columns, five times over
    assert long - short < N * 64 * FLOAT * ((L + 4) * WIDE + 6 * F + 5 * 4 * (C + 128))
    chunk, table = N * CHUNK * REAL * FLOAT, REAL * WIDE * FLOAT
    assert long < 3 * chunk + 4 * table  # logits of a chunk; gradients, twice, and two copies


def test_memory_does_not_grow_with_microbatches(temporaries):
    few, more, most = (temporaries(64, micros) for micros in (2, 4, 8))
    assert more == pytest.approx(few, rel=0.01) and most == pytest.approx(few, rel=0.01)
