"""The RL loop, which reads as the algorithm's box."""

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from rich.console import Console

from fgrpo_jax import (
    Preempted,
    StorageError,
    UserError,
    distributed,
    forms,
    metrics,
    report,
    storage,
    throughput,
)
from fgrpo_jax.advantages import focal_weight
from fgrpo_jax.build import build
from fgrpo_jax.config import Config
from fgrpo_jax.guard import Guard
from fgrpo_jax.preemption import Notice
from fgrpo_jax.profiling import make_profile
from fgrpo_jax.recompiles import Recompiles
from fgrpo_jax.watchdog import Watchdog


def train(c: Config, workdir: pathlib.Path, console: Console) -> dict[str, Any]:
    """Runs, or goes on with, the run of a workdir; returns its summary.

    The workdir gets config.json, metrics.jsonl, evals.jsonl and checkpoints/, and at the end
    summary.json, report.png and policy/, a Hugging Face folder.
    """
    with Watchdog(c.watchdog.lag, c.watchdog.stall) as dog:
        return _train(c, workdir, console, dog)


def _train(c: Config, workdir: pathlib.Path, console: Console, dog: Watchdog) -> dict[str, Any]:
    clock, watch = metrics.Clock(), metrics.Stopwatch(dog.point)
    with contextlib.ExitStack() as stack:
        notice = stack.enter_context(Notice())
        keys = jax.random.split(jax.random.key(c.seed, impl="threefry2x32"), 3)
        eval_key, root_key, adapter_key = keys
        parts, state = build(c, workdir, console, stack, watch, adapter_key)
        dog.signs = parts.answered
        first_step, draws, gamma = int(state.step), int(state.draws), c.algo.focal_gamma
        log = metrics.Journal(workdir / "metrics.jsonl", first_step, metrics.FIELDS, remember=False)
        evals = metrics.Journal(workdir / "evals.jsonl", first_step, ("pass@1", "by_kind"))

        def best_of(steps: list[int]) -> dict[str, Any]:
            return metrics.best(evals.records, c.checkpoint.best, steps)

        parts.checkpoints.best = best_of(parts.checkpoints.steps)["step"]
        guard = Guard(c, workdir / "bad_batch", log.records, console.print)
        ends = c.guard.on_recompile == "end"
        recompiles = stack.enter_context(Recompiles(ends, console.print))
        clock.go_on(log.records)
        bar = stack.enter_context(metrics.Bar(c.steps, first_step, console))

        def look(*progress: int) -> None:
            notice.poll()
            bar.watch(*progress)
            dog.point()

        @contextlib.contextmanager
        def keeping(step: int) -> Iterator[None]:
            """Saves what was learnt if this ends the run, on all hosts together."""
            try:
                yield
            except (UserError, Preempted) as error:
                if distributed.together(f"save {step}"):
                    try:
                        parts.checkpoints.save(state, step)
                    except StorageError as refusal:
                        raise StorageError(f"{error}; and {refusal}") from error
                raise

        def evaluate_once(step: int) -> None:
            if all(record["step"] != step for record in evals.records):
                with watch("eval"):
                    params = parts.decode_params(state.params)
                    result = parts.evaluate(params, eval_key, step, look)
                evals.write({"step": step, **result})
            parts.checkpoints.best = best_of([*parts.checkpoints.steps, step])["step"]
            if parts.checkpoints.best == step:
                with watch("checkpoint"):
                    parts.checkpoints.save(state, step)

        profile = make_profile(forms.steps(c.profile.steps), workdir / "profile", watch)
        watch.lap()  # what building took is no step's
        for step in range(first_step, c.steps):
            if step == 0 or (c.eval.every and step % c.eval.every == 0):
                with keeping(step):
                    evaluate_once(step)
            key = jax.random.fold_in(root_key, step)
            with profile(step + 1), recompiles.watch(step >= first_step + 2):
                with keeping(step):
                    with watch("rollout"):  # prompts -> tokens -> scores
                        # no name for the decode weights, which would keep them during the update
                        rollouts, drawn, draws = parts.draw(
                            parts.decode_params(state.params), draws, key, look
                        )
                    with watch("update"):
                        rollouts = parts.shape(rollouts)
                        weight_P = focal_weight(rollouts.correct_PN, gamma, rollouts.valid_PN)
                        rollouts = parts.choose(rollouts)
                        adv_PN = parts.advantage(rollouts)  # GRPO or a relative
                        adv_PN *= weight_P[:, None]  # F-GRPO
                        batch = jax.block_until_ready(parts.split(rollouts, adv_PN))
                    with watch("logprobs"):
                        batch = jax.block_until_ready(parts.old_logprobs(state.params, batch))
                    notice.poll()
                with watch("update"):
                    state, numbers = jax.block_until_ready(parts.update(state, batch))
            state = dataclasses.replace(
                state, draws=jax.device_put(np.int32(draws), state.draws.sharding)
            )
            numbers, learned = jax.device_get(numbers), parts.throughput.work(batch)
            del batch  # whose memory the next rollout may need
            record = {"step": step + 1, **metrics.rollout_metrics(drawn), **numbers}
            record["drift_alarm"] = int(numbers["drift_mean"] > c.rollout.max_drift)
            seconds, sampled = watch.lap(), throughput.sampled(drawn)
            record |= seconds | parts.throughput.metrics(seconds, sampled, learned) | clock.read()
            log.write(record)
            dog.step_done()
            with keeping(step + 1):
                guard(record, rollouts, adv_PN)
                recompiles.check(step + 1)
            bar.show(step + 1, record)
            if step + 1 == c.steps or (step + 1) % c.checkpoint.every == 0:
                with watch("checkpoint"):
                    parts.checkpoints.save(state, step + 1)
        with keeping(c.steps):
            evaluate_once(c.steps)

    dog.point("finish")
    parts.export(workdir / "policy", state.params)
    summary = {
        "before": evals.records[0],
        "after": evals.records[-1],
        "steps": c.steps,
        "peak_flops": parts.throughput.peak.flops,  # a second and device, of mfu
        "peak_flops_source": parts.throughput.peak.source,
        **clock.read(),
    }
    if c.checkpoint.best:
        summary["best"] = best_of(parts.checkpoints.steps)
    if distributed.is_main():
        storage.write(workdir / "summary.json", json.dumps(summary, indent=1) + "\n")
        title = f"{c.algo.name}, gamma {c.algo.focal_gamma:g}, N {c.algo.group_size}"
        steps = metrics.read_records(log.path)
        png = report.draw(title, steps, evals.records, c.eval.samples)
        storage.write(workdir / "report.png", png)
        console.print(report.table(summary["before"], summary["after"], c.eval.samples))
        console.print(
            f"{summary['wall_s']:.0f} s, {summary['cpu_s']:.0f} CPU-s; picture: "
            f"{workdir / 'report.png'}; policy: {workdir / 'policy'}",
            highlight=False,
        )
    return summary
