"""What a config must satisfy: one clear sentence a mistake."""

import math
from typing import Any

from ml_collections import ConfigDict

from fgrpo_jax import UserError, batches, forms
from fgrpo_jax.answers import EXTRACT, KEPT, REWARDS
from fgrpo_jax.choices import (
    ALGORITHMS,
    AT_MOST_1,
    CHOICES,
    NOT_NEGATIVE,
    POSITIVE,
    TARGETS,
    Published,
)
from fgrpo_jax.pass_at_k import powers_up_to

Config = Any  # a locked ConfigDict whose attributes are the keys of config.default()


def keys(c: Config, prefix: str = "") -> dict[str, Any]:
    """The config flattened: "algo.focal_gamma" -> value."""
    flat = {}
    for name, value in c.items():
        flat |= (
            keys(value, f"{prefix}{name}.")
            if isinstance(value, ConfigDict)
            else {f"{prefix}{name}": value}
        )
    return flat


def need(condition: bool, sentence: str) -> None:
    if not condition:
        raise UserError(sentence)


def validate(c: Config) -> Config:
    """Fills algo's bounds from the method's published ones; UserError on what cannot work."""
    flat = keys(c)
    published = ALGORITHMS.get(c.algo.name)
    for key, values in CHOICES.items():
        if flat[key] is not None:
            need(
                flat[key] in values,
                f"{key} is {flat[key]!r}: it must be one of {', '.join(values)}",
            )
    assert published is not None
    for key in ("clip_low", "clip_high", "dual_clip", "aggregator"):
        if c.algo[key] is None:
            c.algo[key] = getattr(published, key)
    flat = keys(c)
    for key, value in flat.items():
        need(not isinstance(value, float) or math.isfinite(value), f"{key} must be finite")
    for key in POSITIVE:
        need(flat[key] > 0, f"{key} is {flat[key]}: it must be above 0")
    for key in NOT_NEGATIVE:
        need(flat[key] >= 0, f"{key} is {flat[key]}: it must not be below 0")
    for key in AT_MOST_1:
        need(flat[key] <= 1, f"{key} is {flat[key]}: it must be at most 1")
    need(c.seed < 2**32, f"seed is {c.seed}: it must be below 2 ** 32")
    need(c.mesh.fsdp > 0 or c.mesh.fsdp == -1, "mesh.fsdp must be above 0, or -1 for all devices")
    _check_adapters(c)
    _check_data(c)
    _check_clips(c, published)
    _check_groups(c)
    _check_penalties(c)
    _check_batches(c)
    need(
        c.watchdog.lag == 0 or c.watchdog.lag > c.score.timeout,
        f"watchdog.lag is {c.watchdog.lag}: it must be above score.timeout, {c.score.timeout}",
    )
    spike = c.guard.spike
    need(spike == 0 or spike > 1, f"guard.spike is {spike}: it must be above 1, or 0 for none")
    measured = [f"pass@{k}" for k in powers_up_to(c.eval.samples)]
    need(
        c.checkpoint.best in ("", *measured),
        f"checkpoint.best is {c.checkpoint.best!r}: evaluations measure {', '.join(measured)}",
    )
    last = max((steps[-1] for steps in forms.steps(c.profile.steps)), default=0)
    need(last <= c.steps, f"profile.steps is {c.profile.steps!r} and the run has {c.steps} steps")
    return c


def _check_adapters(c: Config) -> None:
    need(
        c.lora.rank > 0 or (c.lora.export == "merged" and not c.lora.targets),
        "lora.export or lora.targets is set and lora.rank is 0: set it, or leave them out",
    )
    for target in c.lora.targets:
        need(
            target in TARGETS,
            f"lora.targets names {target!r}: a layer has {', '.join(TARGETS)}",
        )
    need(
        len(set(c.lora.targets)) == len(c.lora.targets),
        f"lora.targets is {', '.join(c.lora.targets)}: name each once",
    )


def _check_data(c: Config) -> None:
    need(
        c.reward in EXTRACT or c.reward in KEPT or all(c.reward.partition(":")),
        f"reward is {c.reward!r}: it must be {REWARDS}",
    )
    need(
        all(c.data.stop),
        "data.stop holds an empty string, which would end every response: leave it out",
    )
    need(
        "{problem}" in c.data.template,
        f"data.template is {c.data.template!r}: it must hold {{problem}}",
    )
    forms.parts(c.data.source, "data.source")
    forms.mapping(c.data.fields)
    need(
        all(part.weight is None for part in forms.parts(c.data.eval_source, "data.eval_source")),
        f"data.eval_source is {c.data.eval_source!r}: it takes no weights, every problem counts",
    )
    need(
        c.score.wrong < c.score.right,
        f"score.wrong is {c.score.wrong}: it must be below score.right, {c.score.right}",
    )


def _check_clips(c: Config, published: Published) -> None:
    name, dual = c.algo.name, c.algo.dual_clip
    need(
        published.dual_clip > 0 or dual == 0,
        f"algo.dual_clip is {dual}: {name} has no dual clip, set it to 0",
    )
    need(
        published.clip_high > 0 or c.algo.clip_low == c.algo.clip_high == 0,
        f"algo.clip_low and algo.clip_high are set: {name} has no clip, leave them None",
    )
    need(
        name in ("cispo", "gmpo") or c.algo.clip_low < 1,
        f"algo.clip_low is {c.algo.clip_low}: a ratio cannot be clipped at 1 - low <= 0",
    )
    need(dual == 0 or dual > 1, f"algo.dual_clip is {dual}: it must be above 1, or 0 for none")


def _check_groups(c: Config) -> None:
    size, subset = c.algo.group_size, c.rollout.subset
    need(size > 1, f"algo.group_size is {size}: a group needs at least 2 samples to compare")
    need(
        subset == 0 or 1 < subset <= size,
        f"rollout.subset is {subset}: it must be in 2 ... algo.group_size, {size}, or 0 for all",
    )
    need(
        c.algo.advantage != "pkpo" or c.algo.pass_k <= (subset or size),
        f"algo.pass_k is {c.algo.pass_k}: a group has only {subset or size} samples",
    )
    lowering = {
        f"score.wrong is {c.score.wrong}": c.score.wrong < 0,
        "score.overlong_buffer is set": c.score.overlong_buffer > 0,
        "kl.place is reward": c.kl.coef > 0 and c.kl.place == "reward",
    }
    for sentence, holds in lowering.items():
        need(
            c.algo.advantage not in ("maxrl", "disco") or not holds,
            f"{sentence}: {c.algo.advantage} divides by a group's mean reward, which must not fall "
            "below 0",
        )
    need(
        not c.score.unlikeliness or c.score.right > 0,
        f"score.right is {c.score.right}: score.unlikeliness takes a share off it, so it must be "
        "above 0",
    )


def _check_penalties(c: Config) -> None:
    need(
        c.kl.coef > 0 or not c.kl.reference,
        f"kl.reference is {c.kl.reference!r} and kl.coef is 0: the reference would not be used; "
        "set kl.coef or leave it empty",
    )
    need(
        c.kl.coef > 0 or not c.kl.offload,
        "kl.offload is set and kl.coef is 0: there is no reference; set kl.coef or leave it out",
    )
    need(
        not (c.kl.offload and c.lora.rank) or bool(c.kl.reference),
        "kl.offload is set, and the reference is the model that the adapters are beside, which "
        "training needs too: leave it out",
    )
    need(
        c.kl.place == "loss" or not c.kl.estimator.endswith("+"),
        f"kl.estimator is {c.kl.estimator!r}: its + is about the gradient, and kl.place is reward, "
        "which has none; leave it out",
    )
    low = c.importance.low if c.importance.kind == "mask" else 0
    need(
        c.importance.kind == "none" or low < 1 <= c.importance.high,
        f"importance.low and importance.high are {c.importance.low} and {c.importance.high}: the "
        "weight 1 of samples without drift must lie between them",
    )
    need(
        c.score.coin < 1,
        f"score.coin is {c.score.coin}: it must be below 1, where all samples would be paid alike",
    )
    need(
        c.score.overlong_buffer <= c.rollout.max_response,
        f"score.overlong_buffer is {c.score.overlong_buffer}: it must be at most "
        f"rollout.max_response, {c.rollout.max_response}",
    )


def _check_batches(c: Config) -> None:
    need(
        c.rollout.prompts % c.learn.minibatch == 0,
        f"rollout.prompts is {c.rollout.prompts}: it must be a multiple of learn.minibatch, "
        f"{c.learn.minibatch}",
    )
    start, end = c.optim.decay_start, c.optim.decay_end
    need(
        (start == end == 0) or c.optim.warmup / batches.updates_a_step(c) <= start < end,
        f"optim.decay_start and optim.decay_end are {start} and {end} rollout steps: the fall must "
        f"begin after optim.warmup, {c.optim.warmup} updates, and before it ends",
    )
    need(
        c.learn.pack == 0 or c.learn.pack >= c.rollout.max_response,
        f"learn.pack is {c.learn.pack}: a packed row must hold the longest response, "
        f"rollout.max_response, {c.rollout.max_response}; 0 packs none",
    )
    need(
        c.learn.pack == 0 or c.model.attention != "cudnn",
        "model.attention is cudnn, which knows no packed rows: set it to auto, or learn.pack to 0",
    )
    need(c.learn.widths <= 6, f"learn.widths is {c.learn.widths}: it must be at most 6")
    need(
        c.learn.pack == 0 or c.learn.widths == 1,
        f"learn.widths is {c.learn.widths} and learn.pack is set: packed rows have one width, 1",
    )
    rows = batches.minibatch_rows(c)
    need(
        rows % min(rows, c.learn.microbatch) == 0,
        f"learn.microbatch is {c.learn.microbatch}: it must divide the minibatch's {rows} rows "
        f"(learn.minibatch * {'rollout.subset' if c.rollout.subset else 'algo.group_size'})",
    )


def check_mesh(c: Config, devices: int, hosts: int = 1) -> tuple[int, int, int]:
    """(replica, fsdp, tp) on so many devices; UserError where mesh or batch do not divide."""
    replica, fsdp, tp = c.mesh.replica, c.mesh.fsdp, c.mesh.tp
    if fsdp == -1:
        fsdp = max(1, devices // (replica * tp))
    need(
        replica * fsdp * tp == devices,
        f"mesh.replica * mesh.fsdp * mesh.tp is {replica} * {fsdp} * {tp} = "
        f"{replica * fsdp * tp}, and there are {devices} devices",
    )
    shards = replica * fsdp
    need(
        shards % hosts == 0,
        f"mesh.replica * mesh.fsdp is {shards} and there are {hosts} hosts, which read their own "
        "rows: it must be a multiple of them, so lower mesh.tp",
    )
    for key, size in (
        ("rollout.prompts", c.rollout.prompts),
        ("learn.microbatch", min(c.learn.microbatch, batches.minibatch_rows(c))),
    ):
        need(
            size % shards == 0,
            f"{key} is {size}: it must be a multiple of the {shards} devices that share rows "
            f"(mesh.replica {replica} * mesh.fsdp {fsdp})",
        )
    return replica, fsdp, tp
