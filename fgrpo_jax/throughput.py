"""How fast the stages of a step were: response tokens a second, and MFU by flops.py's formulas."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fgrpo_jax import accelerators, distributed, flops, timing
from fgrpo_jax.flops import Work
from fgrpo_jax.model_config import ModelConfig
from fgrpo_jax.structs import LearnerBatch, Rollouts


@dataclasses.dataclass(frozen=True)
class Peak:
    """What one device can do."""

    flops: float  # a second
    source: str


def peak_of(device: Any, dtype: Any) -> Peak:
    """Of a jax.Device: the data sheet's where its kind is known, else what a matmul of the dtype
    reaches now, which takes less than half a second."""
    if chip := accelerators.chip_of(device.device_kind):
        return Peak(chip.tflops * 1e12, f"data sheet of {chip.name}, dense bfloat16")
    size = 512 if device.platform == "cpu" else 8192  # that keeps it busy
    flops = timing.matmul_flops(size, 0.2, dtype)
    name = jax.numpy.dtype(dtype).name
    return Peak(flops, f"a {name} matmul of {size} x {size} on {device.device_kind}, measured")


def sampled(rollouts: Rollouts) -> Work:
    """By all hosts: a prompt once, each response whole."""
    length_P = rollouts.prompts.length_P
    length_PN = rollouts.mask_BT.sum(axis=1).reshape(len(length_P), -1)
    return Work(*map(distributed.total, Work.of(length_P, length_PN)))


@dataclasses.dataclass(frozen=True)
class Throughput:
    """Of a run, whose peak it holds."""

    peak: Peak
    work: Callable[[LearnerBatch], Work]  # of a pass over a batch's trained tokens
    metrics: Callable[[dict[str, float], Work, Work], dict[str, float]]


def make_throughput(
    model: ModelConfig,
    peak: Peak,
    devices: int,
    shared: int,
    epochs: int,
    forwards: int,
    frozen: bool,
) -> Throughput:
    """metrics(seconds, sampled, learned): of Stopwatch.lap and the work of rollout and learner.

    MFU is in 0 ... 1: the FLOP that the model needs for a stage's real tokens, recomputation not
    counted, over what all devices could have done in its seconds. Tokens are those of responses,
    as often as the stage went over them. Both are 0 for a stage that had nothing to do.

    Args:
        devices: of all hosts.
        shared: so many adjacent rows of a batch that is not packed compute their prompt once.
        epochs: passes of the update over the batch.
        forwards: passes of the stage logprobs: the old ones, the reference's, which are counted
            as if of the trained rows alone.
        frozen: the model's weights, beside adapters.
    """

    @jax.jit
    def counted(batch: LearnerBatch) -> Work:
        columns = batch.tokens_BS.shape[-1] - batch.mask_BT.shape[-1]
        prompt_R = (columns - batch.start_B).reshape(-1)
        if batch.part_Bs is None:
            prompt_R, length_B = prompt_R[::shared], batch.mask_BT.sum(axis=-1)
        else:
            length_B = batch.length_B
        if batch.part_Bs is not None and columns == 0:  # a prompt before each response
            begin_RM, length_RM = (
                x.reshape(len(prompt_R), -1) for x in (batch.begin_B, batch.length_B)
            )
            before_RM = jnp.pad(begin_RM + length_RM, [(0, 0), (1, 0)])[:, :-1]
            prompt_R = jnp.where(length_RM > 0, begin_RM - before_RM, 0).reshape(-1)
        return Work.of(prompt_R, length_B.reshape(len(prompt_R), -1))

    def work(batch: LearnerBatch) -> Work:
        return Work(*map(float, jax.device_get(counted(batch))))

    def metrics(seconds: dict[str, float], sampled: Work, learned: Work) -> dict[str, float]:
        done = {
            "rollout": (sampled.tokens, flops.forward_flop(model, sampled)),
            "logprobs": (
                forwards * learned.tokens, forwards * flops.forward_flop(model, learned)
            ),
            "update": (
                epochs * learned.tokens, epochs * flops.update_flop(model, learned, frozen)
            ),
        }  # fmt: skip
        out = {"tokens_per_s": sampled.tokens / seconds["step_s"]}
        for stage, (tokens, flop) in done.items():
            took = seconds[f"{stage}_s"]
            out[f"tokens_per_s/{stage}"] = tokens / took if tokens else 0.0
            out[f"mfu/{stage}"] = flop / (took * devices * peak.flops) if flop else 0.0
        return out

    return Throughput(peak, work, metrics)
