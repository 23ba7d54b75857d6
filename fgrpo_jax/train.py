"""The RL loop, which reads as the algorithm's box, and what it is built from."""

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from rich.console import Console

from fgrpo_jax import (
    UserError,
    config,
    distributed,
    metrics,
    prompts,
    report,
    rewards,
    sharding,
    weights,
)
from fgrpo_jax import tokenizer as tokenizers
from fgrpo_jax import workdir as workdirs
from fgrpo_jax.advantages import focal_weight, group_advantage
from fgrpo_jax.checkpoint import Checkpoints
from fgrpo_jax.config import Config
from fgrpo_jax.evaluate import make_evaluate
from fgrpo_jax.model import DTYPES, Policy
from fgrpo_jax.optimizer import make_optimizer, make_schedule
from fgrpo_jax.rollouts import Collect, learner_batch, make_collect
from fgrpo_jax.sampler import SamplerSettings, make_sampler
from fgrpo_jax.structs import LearnerBatch, Prompts, Rollouts, TrainState
from fgrpo_jax.update import UpdateSettings, abstract_state, init_state, make_update


@dataclasses.dataclass(frozen=True)
class Parts:
    """What the loop is made of, built from the config."""

    prompts_at: Callable[[int], Prompts]  # by step
    decode_params: Callable[[Any], Any]
    collect: Collect
    split: Callable[[Rollouts, jax.Array], LearnerBatch]
    update: Callable[[TrainState, LearnerBatch], tuple[TrainState, dict[str, jax.Array]]]
    evaluate: Callable[[Any, jax.Array], dict[str, Any]]
    checkpoints: Checkpoints


def train(c: Config, workdir: pathlib.Path, console: Console) -> dict[str, Any]:
    """Runs, or goes on with, the run of a workdir; returns its summary.

    The workdir gets config.json, metrics.jsonl, evals.jsonl and checkpoints/, and at the end
    summary.json, report.png and policy/, a Hugging Face folder.
    """
    clock = metrics.Clock()
    with contextlib.ExitStack() as stack:
        parts, state = build(c, workdir, console, stack)
        first_step = int(state.step)
        log = metrics.Journal(workdir / "metrics.jsonl", first_step)
        evals = metrics.Journal(workdir / "evals.jsonl", first_step)
        clock.go_on(log.records)
        bar = stack.enter_context(metrics.Bar(c.steps, first_step, console))
        eval_key, root_key = jax.random.split(jax.random.key(c.seed, impl="threefry2x32"))

        def evaluate_once(step: int) -> None:
            if all(record["step"] != step for record in evals.records):
                evals.write(
                    {"step": step, **parts.evaluate(parts.decode_params(state.params), eval_key)}
                )

        for step in range(first_step, c.steps):
            if step == 0 or (c.eval.every and step % c.eval.every == 0):
                evaluate_once(step)
            watch = metrics.Stopwatch()
            key = jax.random.fold_in(root_key, step)
            with watch("rollout"):  # prompts -> tokens -> scores
                rollouts = parts.collect(
                    parts.decode_params(state.params), parts.prompts_at(step), key
                )
            with watch("update"):
                adv_PN = group_advantage(rollouts.reward_PN)  # GRPO
                adv_PN *= focal_weight(rollouts.correct_PN, c.algo.focal_gamma)[:, None]  # F-GRPO
                state, numbers = parts.update(state, parts.split(rollouts, adv_PN))
                numbers = jax.device_get(numbers)
            if not np.isfinite(numbers["loss"] + numbers["grad_norm"]):
                raise FloatingPointError(
                    f"step {step + 1}: loss or gradient is not finite; nothing of it was saved"
                )
            record = metrics.rollout_metrics(rollouts) | numbers
            record |= watch.metrics(distributed.total(rollouts.mask_BT.sum())) | clock.read()
            log.write({"step": step + 1, **record})
            bar.show(step + 1, record)
            if step + 1 == c.steps or (step + 1) % c.checkpoint.every == 0:
                parts.checkpoints.save(state, step + 1)
        evaluate_once(c.steps)

    policy_folder = weights.resolve(c.model.path)
    weights.export(workdir / "policy", state.params, policy_folder)
    summary = {
        "before": evals.records[0],
        "after": evals.records[-1],
        "steps": c.steps,
        **clock.read(),
    }
    if distributed.is_main():
        (workdir / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
        title = f"{c.algo.name}, gamma {c.algo.focal_gamma:g}, N {c.algo.group_size}"
        report.draw(workdir / "report.png", title, log.records, evals.records, c.eval.samples)
        console.print(report.table(summary["before"], summary["after"], c.eval.samples))
        console.print(
            f"{summary['wall_s']:.0f} s, {summary['cpu_s']:.0f} CPU-s; picture: "
            f"{workdir / 'report.png'}; policy: {workdir / 'policy'}",
            highlight=False,
        )
    return summary


def build(
    c: Config, workdir: pathlib.Path, console: Console, stack: contextlib.ExitStack
) -> tuple[Parts, TrainState]:
    """The parts of a run and its state, restored where the workdir has a checkpoint.

    What can be wrong with the user's input is found before any weight is read. The stack closes
    what was opened.
    """
    workdirs.check(c, workdir)
    folder = weights.resolve(c.model.path)
    shape = weights.model_config(folder)
    mesh = sharding.make_mesh(*config.check_mesh(c, jax.device_count()))
    tokenizer = tokenizers.load(folder)
    policy = Policy(shape, DTYPES[c.model.dtype](), c.model.remat == "full", tokenizer.size)
    weights.check(folder, policy)
    train_set = prompts.load(c, c.data.source, "train", tokenizer)
    held_out = prompts.load(c, c.data.eval_source, "test", tokenizer)
    largest = max(max(ids) for ids in (tokenizer.stop_ids, *train_set.tokens, *held_out.tokens))
    if largest >= shape.vocab:
        raise UserError(
            f"{folder}: its tokenizer gives id {largest}, and the model has {shape.vocab} rows: "
            "tokenizer and weights are of different models"
        )
    optimizer = make_optimizer(c.optim)
    abstract = abstract_state(policy, optimizer, mesh)
    console.print(
        f"{c.model.path}: {shape.layers} layers of width {shape.width}; "
        f"{len(train_set.problems):,} prompts, {train_set.dropped:,} more dropped as too long; "
        f"mesh {dict(mesh.shape)}; workdir {workdir}",
        highlight=False,
    )

    stack.enter_context(jax.set_mesh(mesh))
    scorer = stack.enter_context(rewards.Scorer(c.reward, c.score.workers, c.score.timeout))
    checkpoints = stack.enter_context(Checkpoints(workdir / "checkpoints", c.checkpoint.keep))

    def collector(samples: int, temperature: float) -> Collect:
        settings = SamplerSettings(
            samples, c.rollout.max_response, temperature, tokenizer.stop_ids, c.rollout.chunk
        )
        return make_collect(make_sampler(policy, settings), samples, tokenizer, scorer, mesh)

    size, share = c.rollout.prompts, distributed.share(c.rollout.prompts)
    evaluate = make_evaluate(
        collector(c.eval.samples, c.eval.temperature),
        held_out,
        c.eval.problems,
        size,
        c.eval.samples,
    )
    settings = UpdateSettings(
        surrogate=c.algo.name,
        clip_low=c.algo.clip_low,
        clip_high=c.algo.clip_high,
        dual_clip=c.algo.dual_clip,
        temperature=c.rollout.temperature,
        epochs=c.learn.epochs,
        logit_chunk=c.learn.logit_chunk,
    )
    minibatches = size // c.learn.minibatch
    rows = c.learn.minibatch * c.algo.group_size
    microbatches = rows // min(rows, c.learn.microbatch)
    updates = c.steps * minibatches * c.learn.epochs
    if 0 < c.optim.decay_end < updates:
        console.print(
            f"warning: the learning rate is 0 from optimizer update {c.optim.decay_end} "
            f"(optim.decay_end) to {updates}, the run's last"
        )
    state = checkpoints.restore(abstract)
    if state is None:
        state = init_state(weights.load(folder, policy, mesh), optimizer, abstract)
    if int(state.step) > c.steps:
        raise UserError(f"{workdir} has already done {int(state.step)} steps: raise steps")
    workdirs.claim(c, workdir)
    return Parts(
        prompts_at=lambda step: prompts.batch_at(train_set, step, size, c.seed, share),
        decode_params=weights.make_decode_params(policy, mesh),
        collect=collector(c.algo.group_size, c.rollout.temperature),
        split=lambda rollouts, adv_PN: learner_batch(
            rollouts, adv_PN, minibatches, microbatches, mesh
        ),
        update=make_update(policy, optimizer, make_schedule(c.optim), settings, abstract),
        evaluate=evaluate,
        checkpoints=checkpoints,
    ), state
