"""What an update costs, and a whole step: rollout and update of a random Qwen2 of any shape."""

import dataclasses
import json
import math
import time
from typing import Any

import jax
import numpy as np

from fgrpo_jax import batches, config, sharding, weights
from fgrpo_jax.bench_sampler import SHAPES, STOP, Shape, check, make_policy, prompts_of
from fgrpo_jax.flops import Work, update_flop
from fgrpo_jax.layout import SamplerSettings
from fgrpo_jax.model import Policy
from fgrpo_jax.objective import make_objective
from fgrpo_jax.optimizer import make_optimizer, make_schedule
from fgrpo_jax.rollouts import learner_batch
from fgrpo_jax.sampler import gather, make_sampler
from fgrpo_jax.sampling import Sampling
from fgrpo_jax.structs import Rollouts
from fgrpo_jax.timing import ceilings, peak_rss, timed
from fgrpo_jax.update import UpdateSettings, abstract_state, init_state, make_update
from fgrpo_jax.validation import need


def run(
    shape: str, repeats: int, pack: int, whole: bool, share: bool, widths: int, **changes: Any
) -> None:
    """Prints one JSON object."""
    changes = {name: value for name, value in changes.items() if value is not None}
    x = dataclasses.replace(SHAPES[shape], **changes)
    print(json.dumps(measure(x, repeats, pack, whole, share, widths), indent=1))


def measure(
    x: Shape, repeats: int, pack: int, whole: bool, share: bool, widths: int
) -> dict[str, Any]:
    """Of one minibatch of all rows, under GRPO with AdamW."""
    check(x)
    longest = x.response + x.prompt * whole
    need(not pack or pack >= longest, f"--pack is {pack}: it must be at least {longest}, or 0")
    need(bool(pack) or not whole, "--whole is about packed rows: give --pack too")
    sampled = make_policy(x)  # whose responses have the lengths asked for
    # prompts that several responses see are known to xla alone
    backends = ("xla", "xla") if pack and not whole else sampled.backends
    policy = Policy(sampled.config, sampled.dtype, backends=backends)
    c = config.default()
    c.algo.clip_low = c.algo.clip_high = 0.2
    c.algo.dual_clip, c.algo.aggregator = 3.0, "token_mean"
    c.rollout.max_response, c.learn.widths = x.response, widths
    need(not pack or widths == 1, "--pack and --widths exclude each other: packed rows have one")
    mesh = sharding.make_mesh(1, jax.device_count(), 1)
    rows = x.prompts * x.samples
    schedule = make_schedule(c.optim, 1)
    optimizer = make_optimizer(c.optim, schedule)
    settings = SamplerSettings(
        x.samples, x.response, Sampling(), (STOP if x.median else x.vocab,), x.chunk, x.slots
    )
    stream, prompts = make_sampler(sampled, settings), prompts_of(x)
    # packing leaves some empty; rows of like length are a quarter of a group
    micros = x.samples if pack else 4 * x.prompts if widths > 1 else 1
    a_device = rows // micros // jax.device_count()
    shared = math.gcd(x.samples, x.samples if pack else a_device) if share and not whole else 1
    with jax.set_mesh(mesh):
        abstract = abstract_state(policy, optimizer, mesh)
        state = init_state(jax.jit(policy.init)(jax.random.key(0)), optimizer, abstract)
        how = UpdateSettings(make_objective(c), 1.0, 1, 512, shared, batches.widths(c))
        update = make_update(policy, optimizer, schedule, how, abstract)
        decode_params = weights.make_decode_params(policy, mesh, x.unroll)
        key = jax.random.key(0, impl="threefry2x32")
        random = np.random.default_rng(1)
        advantage_PN = random.normal(size=(x.prompts, x.samples)).astype(np.float32)

        def sample() -> Rollouts:
            out = gather(stream(decode_params(state.params), prompts, key), rows, settings)
            zero_PN = np.zeros((x.prompts, x.samples), np.float32)
            return Rollouts(
                prompts, out.tokens_BT, out.mask_BT, out.logp_BT, out.finished_B, zero_PN,
                zero_PN, np.ones(zero_PN.shape, bool), (), (),
            )  # fmt: skip

        def batch_of(rollouts: Rollouts) -> Any:
            return learner_batch(
                rollouts, advantage_PN, 1, micros, mesh, pack=pack, whole=whole,
                widths=how.widths, shared=shared,
            )  # fmt: skip

        def learn(batch: Any) -> Any:
            nonlocal state
            state, metrics = update(state, batch)
            return metrics

        rollouts = sample()
        batch = batch_of(rollouts)
        before = time.perf_counter()
        padding = float(learn(batch)["padding"])
        first_update_s = time.perf_counter() - before
        times = timed(
            {"update": lambda: learn(batch), "step": lambda: learn(batch_of(sample()))}, repeats
        )
    micro_rows, S = batch.tokens_BS.shape[2:]
    used_ZZ = np.zeros((1, micros), int) if batch.width_ZZ is None else np.array(batch.width_ZZ)
    computed = micro_rows * int(np.array(how.widths)[used_ZZ].sum()) + rows // shared * x.prompt
    if pack:
        computed = int(batch.used_Z.sum()) * micro_rows * S
    limits = ceilings(dtype=policy.dtype)
    tokens = int(rollouts.mask_BT.sum())
    length_RM = rollouts.mask_BT.sum(axis=1).reshape(-1, shared)
    work = Work.of(np.full(len(length_RM), x.prompt), length_RM)
    gflop = update_flop(policy.config, work) / 1e9
    (update_cpu, update_wall), (step_cpu, step_wall) = times["update"], times["step"]
    return {
        "shape": dataclasses.asdict(x),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "attention": policy.backends,
        "tokens": tokens,
        "columns": computed,  # of prompts and responses
        "padding": padding,
        "pack": pack,
        "whole": whole,
        "widths": how.widths,
        "rows_a_prompt": shared,
        "update_cpu_s": update_cpu,
        "update_wall_s": update_wall,
        "step_cpu_s": step_cpu,
        "step_wall_s": step_wall,
        "update_tokens_per_cpu_s": tokens / update_cpu,
        "step_tokens_per_cpu_s": tokens / step_cpu,
        "update_gflop": gflop,
        **limits,
        "share_of_matmul_ceiling": gflop / limits["matmul_gflop_per_cpu_s"] / update_cpu,
        "first_update_s": first_update_s,
        "peak_rss_bytes": peak_rss(),
    }
