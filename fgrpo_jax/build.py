"""What a run is made of, built from its config."""

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh
from rich.console import Console

from fgrpo_jax import (
    UserError,
    adapters,
    attention,
    batches,
    cautions,
    checkpoint,
    config,
    distributed,
    export,
    layout,
    prompts,
    rewards,
    sharding,
    validation,
    weights,
)
from fgrpo_jax import tokenizer as tokenizers
from fgrpo_jax import workdir as workdirs
from fgrpo_jax.checkpoint import Checkpoints
from fgrpo_jax.config import Config
from fgrpo_jax.estimators import make_advantage, shape_rewards
from fgrpo_jax.held_out import make_evaluate
from fgrpo_jax.layout import SamplerSettings
from fgrpo_jax.manifest import checksums
from fgrpo_jax.metrics import Stopwatch
from fgrpo_jax.model import DTYPES, Policy, backends_of, shares_columns
from fgrpo_jax.optimizer import make_optimizer, make_schedule
from fgrpo_jax.reference import make_reference
from fgrpo_jax.rollouts import learner_batch, make_collect
from fgrpo_jax.sampler import Stream, make_sampler
from fgrpo_jax.sampling import Sampling
from fgrpo_jax.selection import Draw, make_draw, most_varied
from fgrpo_jax.structs import LearnerBatch, Rollouts, TrainState
from fgrpo_jax.throughput import Throughput, make_throughput, peak_of
from fgrpo_jax.tokenizer import StopStrings, Tokenizer
from fgrpo_jax.update import abstract_state, init_state, make_old_logprobs, make_update, settings_of


@dataclasses.dataclass(frozen=True)
class Parts:
    """What the loop is made of, built from the config."""

    decode_params: Callable[[Any], Any]
    draw: Draw
    shape: Callable[[Rollouts], Rollouts]  # rewards; raw correctness stays
    choose: Callable[[Rollouts], Rollouts]  # samples to train on
    advantage: Callable[[Rollouts], jax.Array]
    split: Callable[[Rollouts, jax.Array], LearnerBatch]
    update: Callable[[TrainState, LearnerBatch], tuple[TrainState, dict[str, jax.Array]]]
    old_logprobs: Callable[[Any, LearnerBatch], LearnerBatch]
    evaluate: Callable[..., dict[str, Any]]
    throughput: Throughput
    checkpoints: Checkpoints
    answered: Callable[[], int]  # questions to reward workers, so far
    export: Callable[[pathlib.Path, Any], None]


def make_policy(c: Config, folder: pathlib.Path, tokenizer: Tokenizer) -> Policy:
    """The policy of a model's folder on the devices here, held against the folder's weights."""
    shape = weights.model_config(folder)
    dtype, platform = DTYPES[c.model.dtype](), jax.default_backend()
    backends = backends_of(c, platform, dtype, shape.head_size)
    policy = Policy(
        shape, dtype, c.model.remat, tokenizer.size, backends, shares_columns(c, platform),
        adapters.make_lora(c),
    )  # fmt: skip
    weights.check(folder, policy)
    return policy


def export_policy(
    c: Config, policy: Policy, mesh: Mesh, folder: pathlib.Path, out: pathlib.Path, params: Any
) -> None:
    """Writes what was trained as a folder of Hugging Face's or peft's; `folder` is the model's."""
    if policy.lora and c.lora.export == "adapter":
        return export.export_adapters(out, params, policy.lora, folder)
    if policy.lora:  # into the weights as they are in the folder, not as they compute
        whole = weights.load(folder, policy, mesh)
        layout = sharding.state_shardings(mesh, whole)
        params = jax.jit(policy.merged, out_shardings=layout, donate_argnums=1)(params, whole)
    export.export(out, params, folder)


def build(
    c: Config,
    workdir: pathlib.Path,
    console: Console,
    stack: contextlib.ExitStack,
    watch: Stopwatch,
    adapter_key: jax.Array,
) -> tuple[Parts, TrainState]:
    """The parts of a run and its state, restored where the workdir has a checkpoint.

    What can be wrong with the user's input is found before any weight is read. The stack closes
    what was opened.
    """
    workdirs.check(c, workdir)
    folder = weights.resolve(c.model.path)
    mesh = sharding.make_mesh(*validation.check_mesh(c, jax.device_count(), distributed.hosts()))
    tokenizer = tokenizers.load(folder)
    policy = make_policy(c, folder, tokenizer)
    shape, dtype, backends = policy.config, policy.dtype, policy.backends
    platform = jax.default_backend()
    reference_folder = folder
    if c.kl.reference:
        reference_folder = weights.resolve(c.kl.reference, "kl.reference")
        weights.check(reference_folder, policy)
    scorer = stack.enter_context(rewards.Scorer(c.reward, c.score.workers, c.score.timeout))
    train_set, held_out = (
        prompts.load(c, source, split, tokenizer, scorer.check_golds)
        for source, split in ((c.data.source, "train"), (c.data.eval_source, "test"))
    )
    largest = max(max(ids) for ids in (tokenizer.stop_ids, *train_set.tokens, *held_out.tokens))
    if largest >= shape.vocab:
        raise UserError(
            f"{folder}: its tokenizer gives id {largest}, and the model has {shape.vocab} rows: "
            "tokenizer and weights are of different models"
        )
    schedule = make_schedule(c.optim, batches.updates_a_step(c))
    optimizer = make_optimizer(c.optim, schedule)
    abstract = abstract_state(policy, optimizer, mesh)
    console.print(
        f"{c.model.path}: {shape.layers} layers of width {shape.width}; "
        f"mesh {dict(mesh.shape)}; workdir {workdir}",
        highlight=False,
    )
    for name, loaded in (("data.source", train_set), ("data.eval_source", held_out)):
        console.print(f"{name}: {prompts.summary(loaded)}", highlight=False)

    peak = peak_of(jax.devices()[0], dtype)  # under no mesh, so that each device may run its own
    stack.enter_context(jax.set_mesh(mesh))
    stack.enter_context(workdirs.locked(workdir))
    checkpoints = checkpoint.of(c, workdir)

    stop = StopStrings(tokenizer, c.data.stop) if c.data.stop else None
    text_of = stop.text if stop else lambda tokens: tokenizer.decode(tokens.tolist())

    def sampler(
        name: str, prompts: int, samples: int, sampling: Sampling, columns: int
    ) -> tuple[Stream, SamplerSettings]:
        settings = layout.settings_of(c, policy, samples, sampling, tokenizer.stop_ids, columns)
        rows = prompts * samples
        console.print(
            f"{name}: {min(settings.slots, rows):,} of {rows:,} rows decode at a time",
            highlight=False,
        )
        return make_sampler(policy, settings, stop and stop.stopped), settings

    train_sampling = Sampling(
        c.rollout.temperature, c.rollout.top_k, c.rollout.top_p, c.rollout.min_p
    )
    eval_sampling = Sampling(c.eval.temperature, c.eval.top_k, c.eval.top_p, c.eval.min_p)
    collect = make_collect(
        *sampler("rollout", c.rollout.prompts, c.algo.group_size, train_sampling, train_set.width),
        text_of,
        scorer,
        c.score.wrong,
        c.score.right,
        drop_truncated=c.algo.truncated == "drop",
        scoring=lambda: watch("scoring"),
    )
    size, share = c.rollout.prompts, distributed.share(c.rollout.prompts)
    shards = sharding.shards(*sharding.ROWS)
    evaluate = make_evaluate(
        sampler("eval", c.eval.problems, c.eval.samples, eval_sampling, held_out.width)[0],
        text_of,
        scorer,
        held_out,
        c.eval.problems,
        c.eval.samples,
        shards,
        workdir / "evaluation",
    )
    minibatches = size // c.learn.minibatch
    rows = batches.minibatch_rows(c)
    microbatches = rows // min(rows, c.learn.microbatch)
    for warning in cautions.warnings(c, config.default()):
        console.print(f"warning: {warning}")
    base = weights.load(folder, policy, mesh, policy.dtype) if policy.lora else None
    checkpoints.beside = checksums(base)  # the adapters' model
    state = checkpoints.restore(abstract)
    if state is None:
        fresh = weights.load(folder, policy, mesh) if base is None else policy.trained(adapter_key)
        state = init_state(fresh, optimizer, abstract)
    if int(state.step) > c.steps:
        raise UserError(f"{workdir} has already done {int(state.step)} steps: raise steps")
    reference: dict[str, Callable[[Rollouts], Rollouts]] = {}  # by where its KL goes
    if c.kl.coef:
        own = base is None or c.kl.offload or reference_folder.resolve() != folder.resolve()
        logprobs = make_reference(
            dataclasses.replace(policy, lora=None),
            weights.load(reference_folder, policy, mesh, policy.dtype) if own else base,
            c.rollout.temperature, c.learn.logit_chunk, c.learn.microbatch, mesh, c.kl.offload,
        )  # fmt: skip
        reference[c.kl.place] = watch("logprobs")(logprobs)
    as_is = lambda rollouts: rollouts
    decode_params = weights.make_decode_params(policy, mesh, weights.unrolls(c, platform))
    settings = settings_of(c, shards)
    old_logprobs = make_old_logprobs(policy, settings, mesh)
    update = make_update(policy, optimizer, schedule, settings, abstract)

    workdirs.claim(c, workdir)
    return Parts(
        decode_params=lambda params: decode_params(params, base),
        draw=make_draw(
            collect,
            lambda position: prompts.batch_at(train_set, position, size, c.seed, share),
            c.rollout.attempts,
            c.rollout.dynamic,
        ),
        shape=lambda rollouts: shape_rewards(c, reference.get("reward", as_is)(rollouts)),
        choose=lambda rollouts: reference.get("loss", as_is)(
            most_varied(rollouts, c.rollout.subset)
        ),
        advantage=make_advantage(c, train_set.problems),
        split=lambda rollouts, adv_PN: learner_batch(
            rollouts,
            adv_PN,
            minibatches,
            microbatches,
            mesh,
            mask_truncated=c.algo.truncated != "keep",
            with_lengths=c.algo.aggregator == "lambda_grpo",
            pack=c.learn.pack,
            whole=attention.packs_whole(backends[0]),
            widths=settings.widths,
            shared=settings.samples,
        ),
        update=lambda state, batch: update(state, batch, base),
        old_logprobs=lambda params, batch: old_logprobs(params, batch, base),
        evaluate=evaluate,
        throughput=make_throughput(
            shape, peak, jax.device_count(), settings.samples, c.learn.epochs,
            forwards=(batches.updates_a_step(c) > 1) + bool(c.kl.coef),
            frozen=policy.lora is not None,
        ),
        checkpoints=checkpoints,
        answered=lambda: scorer.answered,
        export=functools.partial(export_policy, c, policy, mesh, folder),
    ), state  # fmt: skip
