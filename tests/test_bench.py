import json
import math

import jax
import numpy as np
import pytest

from fgrpo_jax import bench, bench_sampler
from fgrpo_jax.bench_sampler import Mortal, Shape, hazards, step_cost
from fgrpo_jax.layout import SamplerSettings
from fgrpo_jax.model_config import ModelConfig
from fgrpo_jax.sampler import make_sampler
from fgrpo_jax.sampling import Sampling
from fgrpo_jax.structs import Prompts

TINY = Shape(
    layers=2, hidden=32, intermediate=64, heads=4, kv_heads=2, vocab=64, prompts=8, samples=2,
    prompt=4, response=6,
)  # fmt: skip


def test_the_sampler_s_json(monkeypatch, capsys):
    monkeypatch.setitem(bench_sampler.SHAPES, "reference", TINY)
    assert bench.main("sampler --repeats 1 --slots 8 --no-unroll".split()) == 0
    out = json.loads(capsys.readouterr().out)
    assert out["tokens"] == 8 * 2 * 6 and out["steps"] == 12 and out["slots_busy"] == 1
    assert out["shape"]["slots"] == 8 and out["shape"]["unroll"] is False
    for name in (
        "call_cpu_s call_wall_s prefill_cpu_s decode_cpu_ms tokens_per_cpu_s "
        "matmul_gflop_per_cpu_s copy_gb_per_cpu_s compile_s peak_rss_bytes matmuls_cpu_ms"
    ).split():
        assert out[name] > 0, name


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--heads 3", "hidden 256, heads 3, kv_heads 2: each must be"),
        ("--prompts 3", "--prompts is 3: it must be a multiple of the 8 devices"),
        ("--response 0", "--response is 0: it must be above 0"),
    ],
)
def test_shapes_that_cannot_be(flags, message, capsys):
    assert bench.main(["sampler", "--prompts", "8", *flags.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags, message",
    [
        ("--pack 128 --whole", "--pack is 128: it must be at least 192, or 0"),
        ("--whole", "--whole is about packed rows: give --pack too"),
    ],
)
def test_packing_that_cannot_be(flags, message, capsys):
    assert bench.main(["update", "--prompts", "8", *flags.split()]) == 2
    assert message in capsys.readouterr().err


def test_step_cost_by_hand():
    config = ModelConfig(10, 4, 3, 2, 1, 2, 5, 1e6, 1e-6, True)
    # a layer: q and o 4 x 4, k and v 4 x 2, MLP 3 x 4 x 5; head 10 x 4
    matmuls = 3 * (2 * 16 + 2 * 8 + 60) + 40
    flop, moved = step_cost(config, rows=7, columns=11.0, itemsize=2)
    assert flop == 2 * 7 * (matmuls + 3 * 2 * 2 * 2 * 11)
    assert moved == 2 * (matmuls + 7 * 2 * 3 * 2 * 11)


def test_hazards_are_the_log_normal():
    hazard = np.array(hazards(32.0, 0.8, 128))
    survival = np.cumprod(1 - hazard)
    assert survival[31] == pytest.approx(0.5, abs=1e-6)
    assert survival[int(32 * math.exp(0.8)) - 1] == pytest.approx(0.159, abs=0.01)


def test_mortal_policies_live_as_long_as_they_should():
    config = ModelConfig(64, 32, 2, 4, 2, 8, 64, 1e4, 1e-6, True)
    policy = Mortal(config, prompt=4, hazard=hazards(8.0, 0.5, 30))
    params = policy.init(jax.random.key(0))
    settings = SamplerSettings(16, 30, Sampling(), (0,), slots=64)
    tokens = np.ones((32, 4), np.int32)
    positions = np.arange(32, dtype=np.int32)
    prompts = Prompts(tokens, np.full(32, 4, np.int32), positions, ())
    key = jax.random.key(0, impl="threefry2x32")
    stream = make_sampler(policy, settings)(params, prompts, key)
    lengths = np.array([len(response.tokens) for some in stream for response in some])
    assert len(lengths) == 512
    assert np.median(lengths) == pytest.approx(8, abs=1)
    assert np.log(lengths).std() == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("flags", ["--no-share", "", "--pack 6", "--pack 10 --whole"])
def test_the_update_s_json(flags, monkeypatch, capsys):
    monkeypatch.setitem(bench_sampler.SHAPES, "reference", TINY)
    assert bench.main(f"update --repeats 1 {flags}".split()) == 0
    out = json.loads(capsys.readouterr().out)
    assert out["tokens"] == 8 * 2 * 6 and out["padding"] == pytest.approx(0, abs=1e-6)
    columns = 8 * 2 * 6 + 8 * 4 * (1 if flags == "" else 2)
    assert out["columns"] == columns
    assert out["rows_a_prompt"] == (1 if flags in ("--no-share", "--pack 10 --whole") else 2)
    for name in "update_cpu_s step_cpu_s share_of_matmul_ceiling first_update_s".split():
        assert out[name] > 0, name
