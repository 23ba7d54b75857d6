"""The configuration: every key with its unit and meaning, and one clear sentence a mistake."""

import difflib
import importlib.util
import pathlib
import re
from collections.abc import Sequence
from typing import Any

from ml_collections import ConfigDict, config_dict

from fgrpo_jax import UserError

Config = Any  # a locked ConfigDict whose attributes are the keys of default()

ALGORITHMS = {  # algo.name -> the published (clip_low, clip_high, dual_clip); 0 is no dual clip
    "grpo": (0.2, 0.2, 3.0),
    "dapo": (0.2, 0.28, 3.0),  # clip-higher
    "cispo": (1.0, 5.0, 0.0),  # ScaleRL's bounds: importance weights in [0, 6]
}
POSITIVE = (
    "steps algo.group_size rollout.prompts rollout.max_response rollout.chunk "
    "rollout.temperature learn.minibatch learn.microbatch learn.epochs learn.logit_chunk "
    "data.max_prompt score.workers score.timeout checkpoint.every checkpoint.keep eval.samples "
    "eval.problems optim.lr optim.clip_norm mesh.replica mesh.tp sft.steps sft.rows"
).split()
NOT_NEGATIVE = (
    "seed algo.focal_gamma algo.clip_low algo.clip_high algo.dual_clip optim.warmup "
    "optim.decay_start optim.weight_decay eval.every eval.temperature sft.slips"
).split()


def default() -> Config:
    """Every key of a run. A config file says only what differs."""
    c = _section()
    c.seed = 0  # of every random key: samples, data order, initial weights
    c.steps = 200  # rollout steps in the run

    c.model = _section()
    c.model.path = "embedded:tiny_arithmetic"  # Hugging Face folder, or embedded:NAME
    c.model.dtype = "auto"  # of computation: float32, bfloat16; auto: bfloat16, on CPU float32
    c.model.remat = "none"  # recomputed in the backward pass: none, or full (each whole layer)

    c.data = _section()
    c.data.source = "arithmetic"  # arithmetic[:KINDS], or jsonl:PATH with "problem" and "answer"
    c.data.eval_source = "arithmetic"  # the same forms; arithmetic's held-out problems
    c.data.system = ""  # system message; empty: the chat template's own default
    c.data.template = "{problem}"  # the user message; {problem} stands for the problem's text
    c.data.max_prompt = 24  # tokens; longer prompts are dropped and counted

    c.reward = "math"  # math: the last \boxed{}; number: the last number; exact: all of it
    c.score = _section()
    c.score.workers = 2  # processes that judge answers
    c.score.timeout = 5.0  # seconds of wall time an answer, after which it is wrong

    c.algo = _section()
    c.algo.name = "grpo"  # grpo, dapo or cispo
    c.algo.group_size = 8  # N, samples a prompt
    c.algo.focal_gamma = 0.5  # exponent of the focal weight (1 - success rate) ** gamma; 0: off
    c.algo.clip_low = config_dict.placeholder(float)  # ratio kept above 1 - low; None: published
    c.algo.clip_high = config_dict.placeholder(float)  # ratio kept below 1 + high; None: published
    c.algo.dual_clip = config_dict.placeholder(float)  # loss bound c |A| at A < 0; 0: none

    c.rollout = _section()
    c.rollout.prompts = 32  # P, prompts a step
    c.rollout.max_response = 32  # T, tokens
    c.rollout.temperature = 1.0  # above 0; divides the training log-probabilities too
    c.rollout.chunk = 64  # decode steps between two looks of the host

    c.learn = _section()
    c.learn.minibatch = 32  # prompts an optimizer update
    c.learn.microbatch = 256  # rows of a minibatch in memory at a time
    c.learn.epochs = 1  # passes over the rollouts of a step
    c.learn.logit_chunk = 512  # response tokens a row whose logits are in memory at a time

    c.optim = _section()
    c.optim.lr = 1e-6  # peak learning rate
    c.optim.warmup = 15  # optimizer updates of linear rise
    c.optim.decay_start = 0  # optimizer update where a linear fall to 0 begins; 0: none
    c.optim.decay_end = 0  # optimizer update where the rate reaches 0
    c.optim.b1 = 0.9  # AdamW's decay of the first moment
    c.optim.b2 = 0.999  # and of the second
    c.optim.weight_decay = 0.01  # AdamW, decoupled
    c.optim.clip_norm = 1.0  # bound on the gradient's global norm

    c.mesh = _section()
    c.mesh.replica = 1  # copies of the whole sharded state, for slow links
    c.mesh.fsdp = -1  # devices that share rows, parameters and optimizer; -1: all that are left
    c.mesh.tp = 1  # devices that share each layer's heads and features

    c.checkpoint = _section()
    c.checkpoint.every = 50  # steps; the last step is always saved
    c.checkpoint.keep = 2  # newest checkpoints that stay on disk

    c.eval = _section()
    c.eval.every = 50  # steps between evaluations; 0: only before and after
    c.eval.samples = 16  # n of pass@k, k = 1, 2, 4 ... n
    c.eval.problems = 256  # held-out problems, the first of eval_source
    c.eval.temperature = 1.0  # 0: greedy

    c.sft = _section()
    c.sft.out = ""  # folder of the new checkpoint
    c.sft.steps = 600  # optimizer updates
    c.sft.rows = 96  # worked solutions an update
    c.sft.slips = 0.0  # chance that a six-digit worked solution ends in a wrong digit
    c.sft.layers = 2  # L of the new model
    c.sft.width = 96  # D
    c.sft.heads = 4  # Q
    c.sft.kv_heads = 2  # K
    c.sft.feed_forward = 384  # F
    return c.lock()


def _section() -> Config:
    return ConfigDict()


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


def load(path: str, overrides: Sequence[str] = ()) -> Config:
    """The config of a file's get_config(), with overrides "a.b=value" applied, validated.

    Raises UserError with one sentence for an unreadable file, an unknown or mistyped key, or
    values that do not fit together.
    """
    c = _from_file(path)
    for override in overrides:
        _override(c, override)
    return validate(c)


def _from_file(path: str) -> Config:
    if not pathlib.Path(path).is_file():
        raise UserError(f"config file {path} does not exist: give --config a Python file")
    spec = importlib.util.spec_from_file_location("fgrpo_jax_config_file", path)
    if spec is None or spec.loader is None:
        raise UserError(f"config file {path} is not a Python file: its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        c = module.get_config()
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        key = re.search(r'Key "(\w+)"', reason[0])
        hint = _nearest(key[1]) if key and isinstance(error, AttributeError | KeyError) else ""
        reason = f"{key[1]!r} is not a key" if hint and key else reason[0]
        raise UserError(f"config file {path} cannot be read: {reason}{hint}") from error
    if not isinstance(c, ConfigDict):
        raise UserError(f"config file {path}: get_config() must return a ConfigDict")
    expected, given = keys(default()).keys(), keys(c).keys()
    for key in sorted(given - expected):
        raise UserError(f"config file {path}: there is no config key {key!r}{_nearest(key)}")
    for key in sorted(expected - given):
        raise UserError(f"config file {path} lacks {key}: begin with config.default()")
    return c


def _nearest(key: str) -> str:
    flat = list(keys(default()))
    leaf = {name.split(".")[-1]: name for name in flat}
    close = difflib.get_close_matches(key, flat, 1, 0.5)
    if not close:
        close = [leaf[m] for m in difflib.get_close_matches(key.split(".")[-1], leaf, 1, 0.5)]
    return f"; did you mean {close[0]!r}?" if close else "; config.default() lists them all"


def _override(c: Config, text: str) -> None:
    key, equals, value = text.partition("=")
    if not equals:
        raise UserError(f"--config.{text} has no value: write --config.{key}=VALUE")
    if key not in keys(c):
        raise UserError(f"there is no config key {key!r}{_nearest(key)}")
    *path, leaf = key.split(".")
    node = c
    for name in path:
        node = node[name]
    kind = node.get_type(leaf)
    try:
        node[leaf] = None if value == "None" and node[leaf] is None else kind(value)
    except ValueError:
        raise UserError(f"config key {key} takes {kind.__name__}, not {value!r}") from None


def validate(c: Config) -> Config:
    """Fills algo's bounds from the method's published ones; UserError on what cannot work."""

    def need(condition: bool, sentence: str) -> None:
        if not condition:
            raise UserError(sentence)

    need(
        c.algo.name in ALGORITHMS,
        f"algo.name is {c.algo.name!r}: it must be one of {', '.join(ALGORITHMS)}",
    )
    for key, published in zip(
        ("clip_low", "clip_high", "dual_clip"), ALGORITHMS[c.algo.name], strict=True
    ):
        if c.algo[key] is None:
            c.algo[key] = published
    flat = keys(c)
    for key in POSITIVE:
        need(flat[key] > 0, f"{key} is {flat[key]}: it must be above 0")
    for key in NOT_NEGATIVE:
        need(flat[key] >= 0, f"{key} is {flat[key]}: it must not be below 0")
    need(c.mesh.fsdp > 0 or c.mesh.fsdp == -1, "mesh.fsdp must be above 0, or -1 for all devices")
    for key, values in (
        ("model.dtype", ("auto", "float32", "bfloat16")),
        ("model.remat", ("none", "full")),
        ("reward", ("math", "number", "exact")),
    ):
        need(flat[key] in values, f"{key} is {flat[key]!r}: it must be one of {', '.join(values)}")
    need(
        "{problem}" in c.data.template,
        f"data.template is {c.data.template!r}: it must hold {{problem}}",
    )
    for key in ("data.source", "data.eval_source"):
        kind, _, rest = flat[key].partition(":")
        need(
            kind == "arithmetic" or (kind == "jsonl" and bool(rest)),
            f"{key} is {flat[key]!r}: it must be arithmetic[:KINDS] or jsonl:PATH",
        )
    need(
        c.algo.name != "cispo" or c.algo.dual_clip == 0,
        f"algo.dual_clip is {c.algo.dual_clip}: CISPO has no dual clip, set it to 0",
    )
    need(
        c.algo.name == "cispo" or c.algo.clip_low < 1,
        f"algo.clip_low is {c.algo.clip_low}: a ratio cannot be clipped at 1 - low <= 0",
    )
    need(
        c.algo.dual_clip == 0 or c.algo.dual_clip > 1,
        f"algo.dual_clip is {c.algo.dual_clip}: it must be above 1, or 0 for none",
    )
    need(
        c.rollout.prompts % c.learn.minibatch == 0,
        f"rollout.prompts is {c.rollout.prompts}: it must be a multiple of learn.minibatch, "
        f"{c.learn.minibatch}",
    )
    start, end = c.optim.decay_start, c.optim.decay_end
    need(
        (start == end == 0) or c.optim.warmup <= start < end,
        f"optim.decay_start and optim.decay_end are {start} and {end}: the fall must begin after "
        f"optim.warmup, {c.optim.warmup}, and before it ends",
    )
    rows = c.learn.minibatch * c.algo.group_size
    need(
        rows % min(rows, c.learn.microbatch) == 0,
        f"learn.microbatch is {c.learn.microbatch}: it must divide the minibatch's {rows} rows "
        "(learn.minibatch * algo.group_size)",
    )
    return c


def check_mesh(c: Config, devices: int) -> tuple[int, int, int]:
    """(replica, fsdp, tp) on so many devices; UserError where mesh or batch do not divide."""
    replica, fsdp, tp = c.mesh.replica, c.mesh.fsdp, c.mesh.tp
    if fsdp == -1:
        fsdp = max(1, devices // (replica * tp))
    if replica * fsdp * tp != devices:
        raise UserError(
            f"mesh.replica * mesh.fsdp * mesh.tp is {replica} * {fsdp} * {tp} = "
            f"{replica * fsdp * tp}, and there are {devices} devices"
        )
    shards = replica * fsdp
    rows = c.learn.minibatch * c.algo.group_size
    for key, size in (
        ("rollout.prompts", c.rollout.prompts),
        ("learn.microbatch", min(c.learn.microbatch, rows)),
    ):
        if size % shards:
            raise UserError(
                f"{key} is {size}: it must be a multiple of the {shards} devices that share rows "
                f"(mesh.replica {replica} * mesh.fsdp {fsdp})"
            )
    return replica, fsdp, tp
