import gzip
import json
import pathlib
import re

import jax
import pytest
from test_main import ROOT, run

from fgrpo_jax import config, metrics, profiling, programs
from fgrpo_jax.accelerators import Chip, Topology

PARTS = [f"{stage}_s" for stage in (*metrics.STAGES, "idle")]


def events_in(trace: pathlib.Path) -> tuple[set[str], set[str]]:
    """Names of events, and of the programs that they belong to."""
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    programs = {event.get("args", {}).get("hlo_module", "") for event in events}
    return {event.get("name", "") for event in events}, programs


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """A run of two steps, of which the second is traced; a reference and old log-probabilities."""
    workdir = tmp_path_factory.mktemp("profile") / "run"
    out = run(workdir, "steps=2", "checkpoint.every=1", "profile.steps=2", "kl.coef=0.1")
    assert out.returncode == 0, out.stderr
    assert not out.stderr, out.stderr
    return workdir


def test_the_trace_names_the_stages(traced):
    assert [path.name for path in (traced / "profile").iterdir()] == ["step_2"]
    (folder,) = (traced / "profile/step_2/plugins/profile").iterdir()
    assert list(folder.glob("*.xplane.pb"))
    (perfetto,) = folder.glob("perfetto_trace.json.gz")
    names, compiled = events_in(perfetto)
    assert {"step", "rollout", "scoring", "logprobs", "update"} <= names
    assert {
        "jit_prefill", "jit_decode", "jit_reference_logprobs", "jit_old_logprobs", "jit_update",
    } <= compiled  # fmt: skip


def test_where_the_time_of_each_step_went(traced):
    lines = (traced / "metrics.jsonl").read_text().splitlines()
    first, second = map(json.loads, lines)
    for record in (first, second):
        assert sum(record[name] for name in PARTS) == pytest.approx(record["step_s"], rel=1e-9)
        assert all(record[name] > 0 for name in PARTS)
        for stage in ("rollout", "logprobs", "update"):
            assert 0 < record[f"mfu/{stage}"] < 1
            assert record["tokens_per_s"] < record[f"tokens_per_s/{stage}"]
    assert first["eval_s"] > 0 and first["checkpoint_s"] == first["profile_s"] == 0
    assert second["eval_s"] == 0 and min(second["checkpoint_s"], second["profile_s"]) > 0
    # the wall between the records is the step, and what was beside it
    beside = sum(second[f"{name}_s"] for name in metrics.BESIDE)
    wall = second["wall_s"] - first["wall_s"]
    assert wall == pytest.approx(second["step_s"] + beside, abs=0.05)
    summary = json.loads((traced / "summary.json").read_text())
    assert summary["peak_flops"] > 1e7 and "matmul" in summary["peak_flops_source"]


def test_only_chosen_steps_are_traced(tmp_path):
    profile = profiling.make_profile([range(2, 3)], tmp_path, metrics.Stopwatch())
    with profile(1), profile(3):
        pass
    assert not list(tmp_path.iterdir())


def test_programs_name_their_scopes():
    c = config.load(
        str(ROOT / "configs/tiny_arithmetic_focal.py"), ["learn.minibatch=16", "kl.coef=0.1"]
    )
    here = Topology("cpu:1", Chip("cpu", "cpu", 1.0, 0.05, 10.0), (1,))
    built = programs.build(c, here, 16, jax.devices()[:1])
    expected = {
        "decode_params": ["rollout"],
        "prefill": ["rollout/prefill"],
        "decode": ["rollout/decode", "sampling", "refill"],
        "move_back": ["rollout/move_back"],
        "old": ["logprobs"],
        "reference": ["reference", "logprobs"],
        "update": ["update", "logprobs", "loss", "optimizer"],
    }
    assert built.programs.keys() == expected.keys()
    for name, scopes in expected.items():
        text = built.programs[name]().as_text(debug_info=True)
        names = re.sub(r"jit\(\w+\)", "", "\n".join(re.findall(r'loc\("([^"]+)"', text)))
        for scope in scopes:
            assert re.search(rf"(^|[/(]){scope}([/)]|$)", names, re.M), (name, scope)
