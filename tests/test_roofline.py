import dataclasses
import json

import pytest

from fgrpo_jax import programs, roofline
from fgrpo_jax.accelerators import Chip
from fgrpo_jax.model_config import ModelConfig

TINY = ModelConfig(
    vocab=32, width=8, layers=2, heads=4, kv_heads=2, head_size=4, feed_forward=16,
    rope_theta=1e4, rms_eps=1e-6, tied=False,
)  # fmt: skip
SLOW = Chip(
    "slow", "tpu", gib=1.0, tflops=1e-12 * 100, gbs=1e-9 * 10
)  # 100 FLOP, 10 bytes a second


def job(**changes):
    fields = dict(
        model=TINY, chip=SLOW, replica=1, fsdp=1, tp=1, item=2, prompts=2, samples=2, trained=4,
        minibatch=4, microbatch=2, epochs=1, columns=2, response=2, mean_response=1, remat="full",
        logit_chunk=2, old=False, reference=False, slots=2, waiting=1, cached=4, flash=True,
        ragged=True,
    )  # fmt: skip
    return roofline.Job(**(fields | changes))


def test_memory_by_hand():
    parts = roofline.memory(job())
    assert parts["parameters"] == 4 * 2152 and parts["optimizer"] == parts["gradients"] == 8 * 2152
    # keys and values, 2 layers of 2 heads of 4, 2 bytes; 2 slots of 4 columns, 1 prompt of 2
    assert parts["cache"] == 2 * 2 * 2 * 4 * 2 * (2 * 4 + 1 * 2)
    assert parts["decode weights"] == 2 * 2144  # 2 bytes; all but the last norm
    assert parts["batch"] == 4 * (4 * 4 + 5 * 2 + 8)
    assert parts["logits"] == 3 * 4 * 2 * 2 * 32  # three float32 copies, 2 rows of 2 columns
    halved = roofline.memory(job(fsdp=2, tp=1))
    assert halved["parameters"] == 2 * 2152 and halved["decode weights"] == parts["decode weights"]
    assert roofline.memory(job(tp=2))["cache"] == parts["cache"] / 2


def test_flops_by_hand():
    # 2 FLOP a weight and column; attention 4 a query head, head entry and pair, half of 4 x 4
    forward = 2 * (2 * 768 * 4 + 4 * 4 * 4 * 8) + 2 * 256 * 2
    assert roofline.forward_flops(job(), 4, 2) == forward
    assert roofline.forward_flops(job(flash=False), 4, 2) == forward + 2 * 4 * 4 * 4 * 8
    update = roofline.phases(job())["update"]
    # forward, backward twice it, layers once more for full remat, logits once more always
    assert update.flops == 4 * 4 * forward
    assert roofline.phases(job(remat="none"))["update"].flops == 4 * (3 * forward + 1024)
    assert "logprobs" not in roofline.phases(job())
    assert roofline.phases(job(old=True))["logprobs"].flops == 4 * forward
    assert roofline.phases(job(old=True, reference=True))["logprobs"].flops == 8 * forward


def test_what_remat_keeps_and_computes_again():
    """TINY's layer: 8 wide, 4 heads and 2 key heads of 4, 16 features; 2 rows of 4 columns."""
    activations = {
        kind: roofline.memory(job(remat=kind))["activations"]
        - roofline.memory(job(remat="full"))["activations"]
        for kind in ("attention", "dots", "none")
    }
    column = 2 * 2 * 4 * 2  # 2 layers, 2 rows, 4 columns, 2 bytes
    assert activations == {
        "attention": column * 16,  # the heads' outputs
        "dots": column * (8 + 16 + 2 * 8 + 2 * 16),  # o; q; k and v; gate and up
        "none": column * (5 * 8 + 2 * 16 + 4 * 8 + 4 * 16),
    }
    forward, attention, logits = 2 * (2 * 768 * 4 + 4 * 4 * 4 * 8) + 1024, 1024, 1024
    again = {"none": 0, "dots": attention, "attention": 2 * 2 * 768 * 4, "full": forward - logits}
    for kind, flop in again.items():
        update = roofline.phases(job(remat=kind))["update"]
        assert update.flops == 4 * (3 * forward + logits + flop)
    shared = roofline.memory(job(tp=2, share_columns=True))["activations"]
    # of the 2 layers' inputs and the one layer's 6 streams x 1.5, half is on the other device
    saved = 2 * 4 * 2 * (2 * 8 + 1.5 * 6 * 8) / 2
    assert roofline.memory(job(tp=2))["activations"] - shared == saved


def test_adapters_by_hand():
    parts = roofline.memory(job(adapters=100, moments=6, reference=True))
    assert parts["parameters"] == 4 * 100 + 2 * 2152  # the model in the compute dtype
    assert parts["optimizer"] == 600 and parts["gradients"] == 800 and parts["reference"] == 0
    forward = 2 * (2 * 768 * 4 + 4 * 4 * 4 * 8) + 1024
    update = roofline.phases(job(adapters=100, remat="none"))["update"]
    # no gradients of the weights, but attention's 1024 three times; logits, 1024, once more
    assert update.flops == 4 * (2 * forward + 1024 + 1024)


def test_decode_by_hand():
    j = job()
    # 4 responses of 1 token in 2 slots are 2 steps, and so is the longest response
    assert roofline.decode_steps(j) == 2
    decode = roofline.phases(j)["decode"]
    weights = 2 * (2 * 768 + 256)
    seen = 2 + 0.5  # the prompt, and half of the response
    cache = seen * 64 * 2  # 64 bytes a column, 2 slots
    assert decode.bytes == 2 * (weights + cache)
    assert decode.flops == 2 * 2 * (2 * (2 * 768 + 256) + 4 * 2 * 4 * 4 * seen)
    assert decode.seconds == pytest.approx(decode.bytes / 10)  # bytes take longer than FLOPs
    assert decode.bound == "weights"
    half = roofline.phases(job(slots=4))["decode"]  # in 2 steps, that of the longest response
    assert half.bytes == decode.bytes and half.flops == decode.flops
    whole = roofline.phases(job(ragged=False))["decode"]
    assert whole.bytes == 2 * (weights + 4 * 64 * 2)  # all columns of all slots


def test_times_add_up():
    took = roofline.times(job(old=True))
    seconds = {name: phase["seconds"] for name, phase in took["phases"].items()}
    assert took["rollout_s"] == seconds["prefill"] + seconds["decode"]
    assert took["update_s"] == seconds["update"] + seconds["logprobs"]
    assert took["tokens_per_s_per_chip"] == pytest.approx(4 / sum(seconds.values()))
    json.dumps(took)


def large(**changes):
    """Qwen2.5-7B on 16 chips of 16 GiB, the paper's lengths."""
    chip = Chip("v5e", "tpu", 15.75, 197.0, 819.0, 2)
    fields = dict(
        model=programs.model_shape("Qwen2.5-7B"), chip=chip, fsdp=4, tp=4, prompts=256, samples=8,
        trained=2048, minibatch=512, microbatch=64, columns=1024, response=8192,
        mean_response=4096, logit_chunk=512, slots=512, waiting=64, cached=9280, remat="none",
    )  # fmt: skip
    return job(**(fields | changes))


def test_suggestions_fit_by_the_formulas_and_change_little():
    j = large()
    rollout, update = roofline.rollout_bytes(j), roofline.update_bytes(j)
    allowed = 0.9 * 15.75 * 2**30
    assert rollout > allowed and update > allowed
    lines = roofline.suggestions(j, rollout, update)
    assert lines
    for line in lines:
        flags = dict(
            word.removeprefix("--config.").split("=") for word in line.partition(":")[0].split()
        )
        assert "rollout.slots" in flags and "learn.microbatch" in flags
        fsdp, tp = int(flags.get("mesh.fsdp", 4)), int(flags.get("mesh.tp", 4))
        assert fsdp * tp == 16 and j.model.kv_heads % tp == 0
        new = dataclasses.replace(
            j, fsdp=fsdp, tp=tp, slots=int(flags["rollout.slots"]),
            microbatch=int(flags["learn.microbatch"]),
            remat=flags.get("model.remat", "none"), waiting=4,
        )  # fmt: skip
        assert roofline.rollout_bytes(new) <= allowed and roofline.update_bytes(new) <= allowed


def test_no_suggestion_where_the_state_alone_is_too_much():
    j = large(fsdp=1, tp=4, microbatch=8, remat="full")
    assert roofline.suggestions(j, roofline.rollout_bytes(j), roofline.update_bytes(j)) == []


def test_a_suggestion_is_judged_by_its_difference_from_what_was_measured():
    j = large(microbatch=8, remat="full", slots=512)
    measured = 0.9 * 15.75 * 2**30 + 1
    assert any("rollout.slots=256:" in x for x in roofline.suggestions(j, measured, measured / 2))


def test_no_suggestion_is_below_the_state_and_a_gradient():
    chip = Chip("rtx4090", "gpu", 23.6, 165.0, 1008.0)
    model = programs.model_shape("Qwen2.5-1.5B")  # 12 bytes a parameter and 4 of a gradient: 23 GiB
    j = large(model=model, chip=chip, fsdp=1, tp=1, remat="full", microbatch=32, slots=8)
    assert roofline.suggestions(j, 20 * 2**30, 56 * 2**30) == []


def test_suggestions_change_no_more_than_they_must():
    j = large(microbatch=8, remat="full", slots=124, waiting=16)
    first, *others = roofline.suggestions(j, 12.8 * 2**30, 14.3 * 2**30)
    assert first.startswith("--config.learn.microbatch=4: about 12.8 GiB in the rollout and 11")
    assert not any("learn.microbatch" in line for line in others)
