"""The plan: its programs on eight CPU devices, its reports and its sentences."""

import dataclasses
import io
import json
import pathlib

import jax
import numpy as np
import pytest
from ahead_of_time import needs_libtpu, reports
from rich.console import Console

from fgrpo_jax import (
    UserError,
    accelerators,
    batches,
    compiles,
    config,
    hlo,
    plan,
    programs,
    rollouts,
)
from fgrpo_jax.accelerators import Chip, Topology
from fgrpo_jax.model import backends_of
from fgrpo_jax.structs import Problem, Prompts, Rollouts

CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
TINY = str(CONFIGS / "tiny_arithmetic_focal.py")
HERE = Chip("cpu", "cpu", 1.0, 0.05, 10.0)
OUT_OF_MEMORY = """RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: XLA:TPU compile permanent error. \
Ran out of memory in memory space hbm. Used 18.23G of 15.75G hbm. Exceeded hbm capacity by 2.48G.

Total hbm usage >= 18.75G:
    reserved        530.00M
    program          18.23G
"""
TOO_MANY_TEMPORARIES = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries "
    "(27.46G) exceeds available HBM (15.75G)."
)


@pytest.fixture
def on_cpu(monkeypatch):
    """Topologies cpu:N are this process's devices."""

    def topology(name):
        kind, _, n = name.partition(":")
        return Topology(name, HERE, (int(n),)) if kind == "cpu" else found(name)

    found = accelerators.topology
    monkeypatch.setattr(accelerators, "topology", topology)
    monkeypatch.setattr(compiles, "devices", lambda t: jax.devices()[: t.devices])


def spec(tmp_path, *overrides, topology="cpu:8", **changes):
    return dict(
        config=TINY, overrides=list(overrides), methods=[], topology=topology, mean_response=0,
        cache=str(tmp_path / "cache"), level="default",
    ) | changes  # fmt: skip


def test_a_step_on_eight_devices_and_its_cache(on_cpu, tmp_path):
    asked = spec(tmp_path, "mesh.tp=2", "kl.coef=0.1", "learn.minibatch=16", "learn.microbatch=64")
    *each, whole = compiles.report(asked)
    names = [line["program"] for line in each]
    assert names == "decode_params prefill decode move_back update old reference".split()
    assert whole["mesh"] == {"replica": 1, "fsdp": 4, "tp": 2} and whole["fits"]
    parts, formulas = whole["parts"], whole["formulas"]
    assert parts["parameters"] == pytest.approx(whole["parameters"] * 4 / 8, rel=0.02)
    assert parts["optimizer"] == pytest.approx(2 * parts["parameters"], rel=0.01)
    for name in ("parameters", "optimizer", "cache", "batch", "decode weights", "reference"):
        assert parts[name] == pytest.approx(formulas[name], rel=0.1), name
    update = whole["programs"]["update"]
    alive = parts["parameters"] + parts["optimizer"] + parts["batch"]
    assert update["arguments"] == pytest.approx(alive, rel=0.01)
    assert whole["peaks"]["update phase"] >= update["peak"] + parts["reference"]
    assert "all-reduce" in update["collectives"]["loops"]
    old = whole["programs"]["old"]
    assert parts["parameters"] < old["arguments"] < parts["parameters"] + parts["batch"]
    beside = parts["optimizer"] + parts["reference"] + parts["batch"]
    assert whole["peaks"]["old"] == old["peak"] + beside <= whole["peaks"]["update phase"]
    gathers = whole["programs"]["decode"]["collectives"]["loops"].get("all-gather", {})
    assert gathers.get("largest", 0) < parts["decode weights"] / 10  # no weight in the decode loop

    again = list(compiles.report(asked))
    assert all(line["cached"] for line in again[:-1])
    assert again[-1]["peaks"] == whole["peaks"]
    first = next(compiles.report(asked | {"level": "O0"}))
    assert not first["cached"]  # another option is another report


def test_too_little_memory_gives_suggestions(on_cpu, tmp_path, monkeypatch):
    def compile_one(lowered, arguments, folder, options):
        large = "jit_update" in lowered.as_text()[:200]
        return dict(peak=2**30 if large else 2**20, seconds=1.0, cached=False)

    monkeypatch.setattr(compiles, "compile_one", compile_one)
    *_, whole = compiles.report(spec(tmp_path, topology="cpu:1"))
    assert not whole["fits"] and whole["free"] < 0.1
    assert any("--config.learn.microbatch=" in line for line in whole["suggestions"])
    first, *tips = plan.verdict(whole)
    assert first.startswith("cpu:1: does not fit: it needs 1.00 GiB and has 1.00, of which 10%")
    assert tips and all(line.startswith("  would fit: --config.") for line in tips)


@pytest.mark.parametrize(
    "overrides, whole",
    [
        ([], False),
        (["learn.pack=99"], False),
        (["learn.pack=99"], True),
        (["learn.pack=99", "rollout.subset=2", "learn.minibatch=8", "learn.microbatch=8"], True),
        (["learn.widths=3", "learn.minibatch=16"], False),
    ],
)
def test_the_learner_batch_is_that_of_rollouts(overrides, whole):
    settings = ["learn.microbatch=64", "kl.coef=0.1", "algo.aggregator=lambda_grpo"]
    c = config.load(TINY, settings + overrides)
    mesh = jax.make_mesh((1, 8, 1), ("replica", "fsdp", "tp"))
    P, C, T = c.rollout.prompts, c.data.max_prompt, c.rollout.max_response
    N = c.rollout.subset or c.algo.group_size
    rows = batches.minibatch_rows(c)
    row = lambda kind, *shape: np.zeros((P * N, *shape), kind)
    group = lambda kind: np.zeros((P, N), kind)
    prompts = Prompts(
        np.zeros((P, C), np.int32), np.zeros(P, np.int32), np.zeros(P, np.int32),
        (Problem("", ""),) * P,
    )  # fmt: skip
    made = rollouts.learner_batch(
        Rollouts(
            prompts, row(np.int32, T), row(bool, T), row(np.float32, T), row(bool),
            group(np.float32), group(np.float32), group(bool), (), (), row(np.float32, T),
        ),
        group(np.float32), P // c.learn.minibatch, rows // min(rows, c.learn.microbatch), mesh,
        with_lengths=True, pack=c.learn.pack, whole=whole, widths=batches.widths(c),
    )  # fmt: skip
    shapes = programs.learner_batch(c, mesh, whole)
    if shapes.old_logp_BT is not None:  # which fills it up
        made = dataclasses.replace(made, old_logp_BT=made.ref_logp_BT)
    assert jax.tree.structure(made) == jax.tree.structure(shapes)
    for x, shape in zip(jax.tree.leaves(made), jax.tree.leaves(shapes), strict=True):
        assert (x.shape, x.dtype, x.sharding) == (shape.shape, shape.dtype, shape.sharding)


def test_out_of_memory_is_read_from_the_message():
    found = compiles.out_of_memory(OUT_OF_MEMORY, 7)
    assert found == {"oom": "Used 18.23G of 15.75G hbm", "peak": int(18.23 * 2**30)}
    found = compiles.out_of_memory(TOO_MANY_TEMPORARIES, 7)
    said = "temporaries (27.46G) exceeds available HBM (15.75G)"
    assert found == {"oom": said, "peak": int(27.46 * 2**30) + 7}
    assert compiles.out_of_memory("RESOURCE_EXHAUSTED: E1001: scoped vmem", 7) is None
    assert compiles.out_of_memory("INTERNAL: Used 1.0G of 2.0G hbm", 7) is None


class Failing:
    """A lowered program that XLA refuses."""

    def __init__(self, message):
        self.message = message

    def as_text(self):
        return self.message

    def compile(self):
        raise jax.errors.JaxRuntimeError(self.message)


def test_out_of_memory_is_a_result(tmp_path):
    found = compiles.compile_one(Failing(OUT_OF_MEMORY), 7, tmp_path, [])
    assert found["peak"] > 18 * 2**30 and not found["cached"]
    assert compiles.compile_one(Failing(OUT_OF_MEMORY), 7, tmp_path, [])["cached"]
    with pytest.raises(UserError, match="XLA cannot compile it: INTERNAL: no"):
        compiles.compile_one(Failing("INTERNAL: no\nmore"), 7, tmp_path, [])


HLO = """HloModule jit_f

%cond (p: (s32[], f32[8])) -> pred[] {
  %bound = s32[] constant(28)
  ROOT %less = pred[] compare(%i, %bound), direction=LT
}

%all-reduce-scatter.1 (p: f32[8]) -> f32[4] {
  %ar = f32[8]{0} all-reduce(%p), to_apply=%add
}

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %g = (bf16[4,2]{1,0}, bf16[8,2]{1,0}) all-gather-start(%x), dimensions={0}
  %f = f32[4]{0} fusion(%g), kind=kCustom, calls=%all-reduce-scatter.1
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %w = (s32[], f32[8]) while(%t), condition=%cond, body=%body
  %r = (f32[8]{0}, f32[2]{0}) all-reduce(%a, %b), to_apply=%add
}
"""


def test_collectives_are_counted_by_loop():
    found = hlo.collectives(HLO)
    row = lambda count, largest, times: dict(
        count=count, largest=largest, times=times, bytes=times * largest
    )
    assert found["loops"] == {"all-gather": row(1, 32, 28), "reduce-scatter": row(1, 32, 28)}
    assert found["outside"] == {"all-reduce": row(1, 40, 1)}
    noted = HLO.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"5"}}')
    assert hlo.collectives(noted)["loops"]["all-gather"]["times"] == 5


@pytest.mark.parametrize(
    "overrides, sentence",
    [
        (["mesh.fsdp=3"], "cpu:8: mesh.replica * mesh.fsdp * mesh.tp is 1 * 3 * 1 = 3, and there "),
        (["mesh.fsdp=3"], "of its 8 devices these do: fsdp 8 x tp 1, fsdp 4 x tp 2"),
        (["mesh.tp=4"], "mesh.tp is 4: it must divide the model's 2 key heads; of its 8 devices"),
        (["learn.microbatch=1"], "learn.microbatch is 1: it must be a multiple of the 8 devices"),
        (["learn.microbatch=1"], "none does with this batch"),
        (["model.path=x/Qwen2.6"], "its last part is none of the known Qwen2.5-0.5B, Qwen2.5-1.5B"),
        (["model.attention=splash"], "model.attention is 'splash', which needs a TPU"),
    ],
)
def test_mistakes_get_one_sentence(on_cpu, tmp_path, overrides, sentence):
    with pytest.raises(UserError) as error:
        list(compiles.report(spec(tmp_path, *overrides)))
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_mean_response_has_a_limit(on_cpu, tmp_path):
    with pytest.raises(UserError, match="--mean-response is 99: it must be at most rollout.max_re"):
        list(compiles.report(spec(tmp_path, mean_response=99)))


@pytest.mark.parametrize(
    "name, module, sentence",
    [
        ("v5e:2x2", "libtpu", "v5e:2x2 needs libtpu: pip install"),
        (
            "l4:1",
            "jax_plugins.xla_cuda12",
            "l4:1 needs the CUDA plugin, though no GPU: pip install",
        ),
    ],
)
def test_what_to_install_is_said(monkeypatch, name, module, sentence):
    monkeypatch.setattr(programs, "_installed", lambda asked: asked != module)
    with pytest.raises(UserError, match=sentence):
        programs.devices(accelerators.topology(name))


def test_known_names_and_folders():
    shape = programs.model_shape("anywhere/Qwen2.5-7B-Instruct")
    assert (shape.width, shape.layers, shape.kv_heads, shape.tied) == (3584, 28, 4, False)
    assert programs.model_shape("embedded:tiny_arithmetic").width == 96


def test_the_environment_of_the_compiling_process(monkeypatch):
    monkeypatch.setenv("JAX_OPTIMIZATION_LEVEL", "O1")
    monkeypatch.setenv("XLA_FLAGS", "--a")
    tpu, gpu = plan.environment("tpu", "O0"), plan.environment("gpu", "default")
    assert tpu["JAX_OPTIMIZATION_LEVEL"] == "O0" and tpu["XLA_FLAGS"] == "--a"
    assert "JAX_OPTIMIZATION_LEVEL" not in gpu and gpu["CUDA_VISIBLE_DEVICES"] == "-1"
    assert gpu["XLA_FLAGS"] == "--a --xla_gpu_autotune_level=0"


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (["--topology", "v9:1"], "topology 'v9:1': the chip must be one of v4, v5e"),
        (["--topology", "v5e:2x2", "--steps=1"], "unknown flag --steps=1: settings are given as"),
        (["--topology", "v5e:2x2", "--config.steps=0"], "steps is 0: it must be above 0"),
        (["--topology", "v5e:2x2", "--mean-response", "-1"], "--mean-response is -1: it must not"),
    ],
)
def test_the_commands_mistakes(capsys, flags, sentence):
    assert plan.main(["--config", TINY, *flags]) == 2
    assert sentence in capsys.readouterr().err


def report(name, free=0.3, **changes):
    G = 2**30
    program = dict(peak=2 * G, arguments=G, seconds=3.0, cached=False, collectives={})
    names = "decode_params prefill decode move_back update".split()
    cost = dict(flops=1e12, bytes=1e9, seconds=2.0, bound="arithmetic")
    keys = ("parameters", "optimizer", "reference", "decode weights", "cache", "batch")
    return dict(
        topology=name, mesh=dict(replica=1, fsdp=4, tp=4), model="m", memory=16 * G, free=free,
        settings={
            "learn.microbatch": 8, "learn.pack": 0, "model.remat": "full", "rollout.slots": 64
        },
        programs=dict.fromkeys(names, program), parts=dict.fromkeys(keys, G), fits=free > 0.1,
        peaks=dict.fromkeys([*names, "rollout phase", "update phase"], int((1 - free) * 16 * G)),
        out_of_memory=[], compile_s=15.0, suggestions=[],
        roofline=dict(
            rollout_s=7.0, update_s=9.0, tokens_per_s_per_chip=123.4, mean_response=5,
            phases={"decode": cost},
        ),
    ) | changes  # fmt: skip


def test_several_topologies_give_one_table():
    head, rows = plan.summary([report("v5e:4x4"), report("h100:8", free=0.05)])
    assert len(head) == len(rows[0]) == 12
    assert rows[0] == (
        "v5e:4x4|1 x 4 x 4|8, full, 64|11.20|11.20|16.00|30%|yes|7|9|123|15".split("|")
    )
    assert rows[1][0] == "h100:8" and rows[1][7] == "no"
    out = io.StringIO()
    plan.show("title", (head, rows), Console(file=out, width=200), markdown=True)
    lines = out.getvalue().splitlines()
    assert lines[1] == "title" and lines[3].startswith("| topology | mesh")
    assert lines[4].count("---") == 12 and lines[5].startswith("| v5e:4x4 |")
    for table in (plan.parts, plan.programs, plan.collectives, plan.speeds):
        head, rows = table(report("v5e:4x4"))
        assert all(len(row) == len(head) for row in rows)
        plan.show("title", (head, rows), Console(file=out, width=200), markdown=False)


def test_verdicts():
    assert plan.verdict(report("a")) == ["a: fits, with 30% of 16.00 GiB free"]
    out = report("a", free=-0.2, out_of_memory=["update"])
    out["programs"] = out["programs"] | {"update": {"oom": "Used 18.23G of 15.75G hbm"}}
    first, second = plan.verdict(out)
    assert "out of memory in update: Used 18.23G of 15.75G hbm" in first
    assert second == (
        "  no smaller microbatch, full remat, fewer slots or other fsdp x tp would make it fit"
    )


@pytest.mark.parametrize("override", ["learn.pack=99", "learn.widths=2"])
def test_arranged_rows_are_planned(on_cpu, tmp_path, override):
    asked = spec(tmp_path, override, "kl.coef=0.1", "learn.minibatch=16", "learn.microbatch=64")
    *each, whole = compiles.report(asked)
    assert {"update", "old", "reference"} <= {line["program"] for line in each} and whole["fits"]
    assert whole["settings"]["learn.pack"] == (99 if override == "learn.pack=99" else 0)


def test_packed_rows_of_a_tpu_hold_prompts_too(tmp_path, monkeypatch):
    # as if no libtpu were needed: the mistake is found before anything is lowered
    monkeypatch.setattr(compiles, "devices", lambda t: jax.devices()[: t.devices])
    shape = "model.path=Qwen2.5-0.5B"
    c = config.load(TINY, [shape])
    longest = c.data.max_prompt + c.rollout.max_response
    asked = [shape, f"learn.pack={longest - 1}"]
    sentence = f"data.max_prompt \\+ rollout.max_response, {longest}"
    with pytest.raises(UserError, match=sentence):
        list(compiles.report(spec(tmp_path, *asked, topology="v5e:2x2")))
    with pytest.raises(UserError, match="model.attention is 'splash', which needs a TPU"):
        backends_of(config.load(TINY, [*asked, "model.attention=splash"]), "cpu", "float32", 64)
    for platform, backend in (("cpu", "xla"), ("gpu", "xla")):
        assert backends_of(config.load(TINY, asked), platform, "bfloat16", 64)[0] == backend
    fits = config.load(TINY, [shape, f"learn.pack={longest}"])
    assert backends_of(fits, "tpu", "bfloat16", 64) == ("splash", "ragged")
    forced = config.load(TINY, [*asked, "model.attention=xla"])
    assert backends_of(forced, "tpu", "bfloat16", 64) == ("xla", "xla")


@needs_libtpu
def test_a_tpu_that_is_not_here(tmp_path, capsys):
    out, flags = tmp_path / "plan.json", ["--config", TINY, "--topology", "v5e:2x2"]
    flags += ["--json", str(out), "--cache", str(tmp_path / "cache"), "--markdown"]
    assert plan.main([*flags, "--topology", "v5e:3x5"]) == 2
    printed = capsys.readouterr()
    assert "v5e:2x2: fits, with " in printed.out and "| v5e:2x2 | 1 x 4 x 1 |" in printed.out
    assert "error: v5e:3x5" in printed.err
    (whole,) = json.loads(out.read_text())
    assert whole["programs"]["update"]["peak"] < 2**30 and whole["memory"] == 15.75 * 2**30


@needs_libtpu
def test_packed_rows_are_compiled_for_a_tpu():
    plain, packed, mesh = reports("tpu_packing.py")
    # forward, dq, dk and dv: of whole rows, and where prompts are shared of those too
    assert (plain["kernels"], packed["kernels"]) == (6, 3)
    assert packed["peak"] < 1.05 * plain["peak"]
    assert mesh["partitions"]  # fsdp 8 x tp 8 on a torus of 4 x 4 x 4
