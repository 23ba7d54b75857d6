import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import tiny_config

from fgrpo_jax import flops, sharding, throughput
from fgrpo_jax.packing import pack
from fgrpo_jax.rollouts import put_batch
from fgrpo_jax.structs import LearnerBatch, Problem, Prompts, Rollouts
from fgrpo_jax.throughput import Peak, make_throughput, peak_of

PROMPT, RESPONSE = np.array([3, 2]), np.array([[2, 4], [1, 0]])  # tokens
C, T = 4, 5
WORK = (5, 7, 43)  # as in tests/test_flops.py
EACH_ROW = (3 + 3 + 2 + 2, 7, 43 + 6 + 3)  # every row computes its prompt


def batch():
    start = np.repeat(C - PROMPT, 2).astype(np.int32)
    mask = np.arange(T)[None] < RESPONSE.reshape(-1, 1)
    logp, tokens = np.zeros((4, T), np.float32), np.zeros((4, C + T), np.int32)
    return LearnerBatch(tokens, start, mask, np.zeros(4, np.float32), logp)


def of(peak=1.0, devices=1, shared=2, epochs=1, forwards=0):
    return make_throughput(tiny_config(), Peak(peak, ""), devices, shared, epochs, forwards, False)


@pytest.mark.parametrize("shared, expected", [(2, WORK), (1, EACH_ROW)])
def test_the_work_of_a_batch_by_hand(shared, expected):
    mesh = sharding.make_mesh(1, 1, 8)
    for minibatches, micros in ((1, 1), (2, 1)):
        placed = put_batch(batch(), minibatches, micros, mesh)
        assert of(shared=shared).work(placed) == expected


def test_the_work_of_packed_rows_by_hand():
    mesh = sharding.make_mesh(1, 1, 8)
    # 4 and 2 do not fit in 5 columns: the first prompt is computed twice
    packed = put_batch(pack(batch(), 2, 1, 1, 5), 1, 4, mesh)
    assert of().work(packed) == (3 + 5, 7, 43 + 6)
    packed = put_batch(pack(batch(), 2, 1, 1, 6), 1, 4, mesh)
    assert of().work(packed) == WORK


def test_the_work_of_whole_packed_rows_by_hand():
    mesh = sharding.make_mesh(1, 1, 8)
    for columns in (C + T, 20):
        packed = put_batch(pack(batch(), 2, 1, 1, columns, whole=True), 1, 4, mesh)
        # a row each of 3 + 2, 3 + 4 and 2 + 1 tokens; the last response has none
        assert of().work(packed) == (3 + 3 + 2, 7, 5 * 6 / 2 + 7 * 8 / 2 + 3 * 4 / 2)


def test_the_work_of_rollouts_by_hand():
    prompts = Prompts(
        np.zeros((2, C), np.int32), PROMPT, np.zeros(2, np.int32), (Problem("", ""),) * 2
    )
    row, group = np.zeros((4, T), np.float32), np.zeros((2, 2), np.float32)
    mask, yes = np.arange(T)[None] < RESPONSE.reshape(-1, 1), np.ones((2, 2), bool)
    rollouts = Rollouts(
        prompts, row.astype(np.int32), mask, row, yes.reshape(-1), group, group, yes, (), ()
    )
    assert throughput.sampled(rollouts) == WORK


def test_rates_and_mfu_by_hand():
    # 2 layers of 32 x 8 x (2 x 4 + 2 x 2) + 3 x 32 x 64 = 9,216; a head of 48 x 32 = 1,536
    forward = 2 * (12 * 2 * 9216 + 7 * 1536) + 4 * 2 * 4 * 8 * 43
    seconds = {"rollout_s": 2.0, "logprobs_s": 0.5, "update_s": 4.0, "step_s": 7.0}
    work = flops.Work(*WORK)
    speed = of(peak=1e6, devices=2, epochs=3, forwards=2)
    out = speed.metrics(seconds, work, work)
    assert out == {
        "tokens_per_s": 1.0,
        "tokens_per_s/rollout": 3.5,
        "mfu/rollout": pytest.approx(forward / (2 * 2 * 1e6)),
        "tokens_per_s/logprobs": 28.0,
        "mfu/logprobs": pytest.approx(2 * forward / (0.5 * 2 * 1e6)),
        "tokens_per_s/update": 3 * 7 / 4,
        "mfu/update": pytest.approx(3 * 3 * forward / (4 * 2 * 1e6)),
    }
    assert 0 < out["mfu/rollout"] < out["mfu/update"] < out["mfu/logprobs"] < 1
    nothing = of().metrics(seconds | {"logprobs_s": 1e-6}, work, work)
    assert nothing["tokens_per_s/logprobs"] == nothing["mfu/logprobs"] == 0


def test_the_peak_is_the_data_sheet_s_or_measured():
    device = types.SimpleNamespace(device_kind="TPU v5 lite", platform="tpu")
    assert peak_of(device, jnp.bfloat16) == Peak(197e12, "data sheet of v5e, dense bfloat16")
    peak = peak_of(jax.devices()[0], jnp.float32)
    assert 1e7 < peak.flops < 1e13
    assert peak.source == "a float32 matmul of 512 x 512 on cpu, measured"
