"""Memory, FLOPs and bytes of a step by formulas, and what a chip needs for them at least.

XLA counts a loop's body once, so none of this is read from it. Letters as in fgrpo_jax. Sizes are
bytes of one device. What is left out makes real runs slower: collectives, the host, kernels below
the chip's peak.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

from fgrpo_jax.accelerators import Chip
from fgrpo_jax.flops import BACKWARD, Number, Weights, Work, forward_flop, parameters
from fgrpo_jax.model_config import ModelConfig

GIB = 2**30
HEADROOM = 0.1  # of memory that must stay free: peaks at O0 are some 7 % below the full level's


@dataclasses.dataclass(frozen=True)
class Job:
    """What of a config, on a mesh, the formulas read."""

    model: ModelConfig
    chip: Chip
    replica: int
    fsdp: int
    tp: int
    item: int  # bytes of a number in the compute dtype
    prompts: int  # P
    samples: int  # N
    trained: int  # rows that are learned from
    minibatch: int  # rows of an optimizer update
    microbatch: int  # rows
    epochs: int
    columns: int  # C
    response: int  # T, most tokens
    mean_response: int
    remat: str  # as model.remat
    logit_chunk: int
    old: bool  # old log-probabilities are computed
    reference: bool  # those of a reference too
    slots: int  # that decode, over all devices
    waiting: int  # prefilled prompts, over all devices
    cached: int  # S of a slot
    flash: bool  # attention builds no [T, S] array, and skips what is not causal
    ragged: bool  # decoding reads a row's own columns only
    share_columns: bool = False  # tp devices share a row's columns between layers
    adapters: int = 0  # weights of adapters, which alone are trained; 0: all are
    moments: int = 8  # bytes of AdamW's moments, for a trained weight

    @property
    def devices(self) -> int:
        return self.replica * self.fsdp * self.tp

    @property
    def shards(self) -> int:
        """Parts that rows are cut in."""
        return self.replica * self.fsdp


def column_bytes(j: Job) -> int:
    """Keys and values of one column on a device."""
    return j.model.column_bytes(j.item, j.tp)


def memory(j: Job) -> dict[str, Number]:
    """What the parts of a step take; activations and logits are estimates, the rest is exact up
    to padding."""
    m, w = j.model, Weights.of(j.model)
    count, rows = parameters(m) / (j.fsdp * j.tp), j.microbatch / j.shards
    trained = j.adapters / (j.fsdp * j.tp) if j.adapters else count
    S, tp = j.columns + j.response, j.tp
    stream = m.width / (tp if j.share_columns else 1)  # numbers of a column of hidden states
    heads, kv_heads = m.heads * m.head_size / tp, m.kv_heads * m.head_size / tp
    per_column = {  # numbers of a layer that wait for the backward pass
        "full": stream,
        "attention": stream + heads,
        "dots": 2 * stream + heads + 2 * kv_heads + 2 * m.feed_forward / tp,
        "none": 6 * stream + 2 * heads + 4 * kv_heads + 4 * m.feed_forward / tp,
    }
    score = 0.0 if j.flash else 2.5 * 4 * rows * S * S * m.heads / tp
    one_layer = rows * S * per_column["none"] * j.item * 1.5 + score
    kept = m.layers * (
        rows * S * per_column[j.remat] * j.item + (score if j.remat == "none" else 0)
    )
    gathered = 2 * j.item * w.layer / tp + 2 * j.item * w.table / tp
    decoder = m.layers * (w.layer / tp + w.small) + (1 if m.tied else 2) * w.table / tp
    return {
        "parameters": 4 * trained + (j.item * count if j.adapters else 0),
        "optimizer": j.moments * trained,
        "gradients": 8 * trained,  # summed, and a microbatch's
        "activations": kept + one_layer,
        "logits": 3 * 4 * rows * min(j.logit_chunk, j.response) * m.vocab / tp,
        "gathered": gathered,
        "batch": j.trained / j.shards * (4 * S + (5 + 4 * (j.old + j.reference)) * j.response + 8),
        "decode weights": j.item * decoder,
        "cache": column_bytes(j) * (j.slots * j.cached + j.waiting * j.columns) / j.shards,
        # what adapters are beside is the reference too
        "reference": j.item * count if j.reference and not j.adapters else 0.0,
    }


EXACT = ("parameters", "optimizer", "batch", "reference")  # of the update's


def rollout_bytes(j: Job) -> Number:
    """Peak while sampling, but for temporaries."""
    b = memory(j)
    names = ("parameters", "optimizer", "decode weights", "cache", "reference")
    return sum(b[name] for name in names)


def update_bytes(j: Job) -> Number:
    """Peak of the update, about: the weights that decode and their cache are gone."""
    b = memory(j)
    return sum(b.values()) - b["decode weights"] - b["cache"]


def forward_flops(j: Job, columns: int, heads: int) -> Number:
    """Of one row of so many columns, `heads` of them through the head, as it is computed: whole
    tiles above the diagonal are skipped by flash attention only."""
    pairs = columns**2 * (0.5 if j.flash else 1.0)
    return forward_flop(j.model, Work(columns - heads, heads, pairs))


class Cost(NamedTuple):
    """Of one phase on one device."""

    flops: Number
    bytes: Number
    seconds: Number
    bound: str


def _cost(chip: Chip, flops: Number, size: Number, times: Number, what: str = "memory") -> Cost:
    """`times` equal parts, each as slow as the slower of arithmetic and memory."""
    arithmetic, memory = flops / chip.tflops / 1e12, size / chip.gbs / 1e9
    bound = "arithmetic" if arithmetic >= memory else what
    return Cost(flops * times, size * times, max(arithmetic, memory) * times, bound)


def decode_steps(j: Job) -> Number:
    """Of the loop in a rollout: all slots busy, and the longest row at its limit."""
    return max(j.prompts * j.samples * j.mean_response / j.slots, j.response)


def phases(j: Job) -> dict[str, Cost]:
    """Prefill and decode of a rollout; log-probabilities and update. Rows are not packed, so the
    last two compute every column of every row."""
    m, w, chip = j.model, Weights.of(j.model), j.chip
    S, item = j.columns + j.response, j.item
    reads = item * (m.layers * w.layer + w.table) / j.tp  # a pass over the weights
    prefill = _cost(
        chip, j.prompts * forward_flops(j, j.columns, 0) / j.devices,
        reads * max(1, j.prompts / max(j.waiting, 1)), 1, "weights",
    )  # fmt: skip

    steps = decode_steps(j)
    slots = j.prompts * j.samples * j.mean_response / steps / j.shards  # busy ones, on a device
    # prompts count as max_prompt long; half of the response is there on average
    seen = j.columns + j.mean_response / 2 if j.ragged else j.cached
    flops = slots * forward_flop(m, Work(0, 1, seen)) / j.tp
    cache = seen * column_bytes(j) * (slots if j.ragged else j.slots / j.shards)
    decode = _cost(chip, flops, reads + cache, steps, "weights" if reads > cache else "cache")

    one = forward_flops(j, S, j.response)
    layers = one - 2 * w.table * j.response
    attention = layers - 2 * m.layers * w.layer * S
    again = {"none": 0, "dots": attention, "attention": layers - attention, "full": layers}
    # logits are made again; beside adapters, weights need no gradients
    passes = (1 + BACKWARD) * one + again[j.remat] + (one - layers)
    passes -= (one - attention) if j.adapters else 0
    micros = j.trained / j.microbatch
    kept = m.layers * j.microbatch / j.shards * S * m.width * item * 4
    per_micro = (4 if j.remat in ("attention", "full") else 3) * reads + 2 * kept
    count = (j.adapters or parameters(m)) / (j.fsdp * j.tp)
    learn_bytes = j.epochs * (micros * (per_micro + 12 * count))
    learn_bytes += j.epochs * j.trained / j.minibatch * 28 * count  # the optimizer's own
    found = {
        "prefill": prefill,
        "decode": decode,
        "update": _cost(chip, j.epochs * j.trained * passes / j.devices, learn_bytes, 1),
    }
    forward = j.old + j.reference
    if forward:
        flops = forward * j.trained * one / j.devices
        found["logprobs"] = _cost(chip, flops, forward * micros * (reads + kept), 1)
    return found


def times(j: Job) -> dict[str, Any]:
    """Seconds of a step, and tokens a second and chip."""
    costs = phases(j)
    rollout = costs["prefill"].seconds + costs["decode"].seconds
    update = sum(costs[name].seconds for name in ("update", "logprobs") if name in costs)
    tokens = j.prompts * j.samples * j.mean_response
    return {
        "rollout_s": rollout,
        "update_s": update,
        "tokens_per_s_per_chip": tokens / (rollout + update) / j.devices,
        "mean_response": j.mean_response,
        "phases": {name: cost._asdict() for name, cost in costs.items()},
    }


def _others(j: Job) -> Iterator[Job]:
    """The job on other meshes, in smaller microbatches, with full remat, with fewer slots."""
    n = j.fsdp * j.tp
    meshes = [
        (n // tp, tp)
        for tp in (1, 2, 4, 8, 16)
        if n % tp == 0 and j.model.kv_heads % tp == 0 and j.prompts % (j.replica * n // tp) == 0
    ]
    divisors = [d for d in range(j.microbatch, 0, -1) if j.minibatch % d == 0]
    slots = [j.slots >> k for k in range(5)]
    for (fsdp, tp), d, remat, B in itertools.product(meshes, divisors, {j.remat, "full"}, slots):
        shards = j.replica * fsdp
        if d % shards == 0 and shards <= B:
            waiting = max(shards, j.waiting * B // j.slots)
            yield dataclasses.replace(
                j, fsdp=fsdp, tp=tp, microbatch=d, remat=remat, slots=B, waiting=waiting
            )


def _keys(j: Job) -> dict[str, str | int]:
    return {
        "mesh.fsdp": j.fsdp,
        "mesh.tp": j.tp,
        "learn.microbatch": j.microbatch,
        "model.remat": j.remat,
        "rollout.slots": j.slots,
    }


def suggestions(j: Job, rollout: Number, update: Number) -> list[str]:
    """What would fit, one line each, where a compiled step's peaks do not.

    rollout, update: those peaks, in bytes. Of a change, the rollout's is judged by its difference
    in the formulas, and of the update's what is only estimated by its ratio to what was measured.
    The fewest changes come first, of each set of keys the fastest, and none that has to change
    more keys than another.
    """
    allowed = j.chip.gib * GIB * (1 - HEADROOM)
    exact = sum(memory(j)[name] for name in EXACT)
    ratio = max(0, update - exact) / (update_bytes(j) - exact)
    found = []
    for new in _others(j):
        b = memory(new)
        exact = sum(b[name] for name in EXACT)
        peaks = (
            rollout + rollout_bytes(new) - rollout_bytes(j),
            exact + max(ratio * (update_bytes(new) - exact), b["gradients"] / 2),
        )
        if max(peaks) <= allowed:
            changed = {key: x for key, x in _keys(new).items() if x != _keys(j)[key]}
            took = times(new)
            seconds = took["rollout_s"] + took["update_s"]
            found.append((len(changed), seconds, -new.microbatch, changed, peaks, took))
    said: list[tuple[set[str], str]] = []
    for *_, changed, (sampling, learning), took in sorted(found, key=lambda x: x[:3]):
        if changed and not any(keys <= set(changed) for keys, _ in said):
            flags = " ".join(f"--config.{key}={x}" for key, x in changed.items())
            text = (
                f"{flags}: about {sampling / GIB:.1f} GiB in the rollout and {learning / GIB:.1f} "
                f"in the update, {took['rollout_s']:.0f} + {took['update_s']:.0f} s a step at best"
            )
            said.append((set(changed), text))
    return [text for _, text in said]
