"""Learning from a step's rollouts: one jitted update of several optimizer updates."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array

from fgrpo_jax import batches, sharding
from fgrpo_jax.logprobs import make_logprobs, rows_logprobs
from fgrpo_jax.model import Policy
from fgrpo_jax.objective import Objective, aggregate, make_objective, token_loss
from fgrpo_jax.packing import at_width, unpack
from fgrpo_jax.structs import LearnerBatch, TrainState
from fgrpo_jax.validation import Config

Metrics = dict[str, Array]
SUMS = ("skipped", "skipped/not_finite", "skipped/spike", "skipped/drift")  # updates of a step
MEMORY = 0.95  # of the typical gradient norm, an update
WARM = 10  # updates before a gradient norm can be a spike


@dataclasses.dataclass(frozen=True)
class UpdateSettings:
    """What is static in an update."""

    objective: Objective
    temperature: float  # of the sampler
    epochs: int  # passes over the batch
    logit_chunk: int  # response tokens whose logits are in memory at a time
    samples: int = 1  # so many adjacent rows of a device's microbatch have one prompt
    widths: tuple[int, ...] = ()  # response columns that LearnerBatch.width_ZZ means, ascending
    spike: float = 0.0  # an update of a larger gradient norm, in typical ones, is skipped; 0: none
    drift: float = 0.0  # and of a larger mean drift, in nats a token; 0: none


def settings_of(c: Config, shards: int) -> UpdateSettings:
    """A run's, whose rows so many devices share."""
    return UpdateSettings(
        objective=make_objective(c),
        temperature=c.rollout.temperature,
        epochs=c.learn.epochs,
        logit_chunk=c.learn.logit_chunk,
        samples=batches.shared_rows(c, shards),
        widths=batches.widths(c),
        spike=c.guard.spike,
        drift=0.0 if c.guard.on_drift == "warn" else c.rollout.max_drift,
    )


def abstract_state(
    policy: Policy, optimizer: optax.GradientTransformation, mesh: Mesh
) -> TrainState:
    """Shapes and shardings of the state: optimizer state lies as its weights."""
    params = jax.eval_shape(policy.trained, jax.random.key(0))
    shapes = jax.eval_shape(functools.partial(_fresh, optimizer), params)
    layout = sharding.state_shardings(mesh, shapes)
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes, layout
    )


def init_state(
    params: Any, optimizer: optax.GradientTransformation, abstract: TrainState
) -> TrainState:
    """The state before the first step, as `abstract` says."""
    layout = jax.tree.map(lambda x: x.sharding, abstract)
    return jax.jit(functools.partial(_fresh, optimizer), out_shardings=layout)(params)


def _fresh(optimizer: optax.GradientTransformation, params: Any) -> TrainState:
    zero = jnp.int32(0)
    return TrainState(params, optimizer.init(params), zero, zero, jnp.float32(0), jnp.float32(0))


def make_old_logprobs(
    policy: Policy, settings: UpdateSettings, mesh: Mesh
) -> Callable[..., LearnerBatch]:
    """old_logprobs(params, batch, base=None) -> batch with old_logp_BT, where the step has several
    optimizer updates. With one the policy is still the one that sampled: the batch as it is."""
    s = settings
    logprobs = make_logprobs(policy, s.temperature, s.logit_chunk, mesh, "old")

    def old_logprobs(params: Any, batch: LearnerBatch, base: Any = None) -> LearnerBatch:
        if _updates(batch, settings) == 1:
            return batch
        old_logp_BT = logprobs(params, batch, base, samples=s.samples, widths=s.widths)
        return dataclasses.replace(batch, old_logp_BT=old_logp_BT)

    return old_logprobs


def _updates(batch: LearnerBatch, settings: UpdateSettings) -> int:
    """Of the optimizer, in a step."""
    return batch.mask_BT.shape[0] * settings.epochs


def make_update(
    policy: Policy,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    settings: UpdateSettings,
    abstract: TrainState,
) -> Callable[..., tuple[TrainState, Metrics]]:
    """The jitted update(state, batch, base=None) -> state, metrics; the state is donated.

    Each minibatch is one optimizer update. Its loss is the aggregator's sum over all its rows
    divided once by the aggregator's count, whatever microbatches and devices it is spread over.
    A batch of several updates carries old_logp_BT, of the parameters before the first. An update
    whose loss or gradient is not finite, or is beyond settings' bounds, changes nothing; the
    metrics "skipped" and "skipped/..." count those of the step.
    base: the weights that stay as they are, where adapters are trained.
    """
    s, objective = settings, settings.objective

    def loss_sum(params, exponent, rows: LearnerBatch, count, base):
        """This microbatch's share of the minibatch's loss, and sums over its tokens."""
        params = policy.weights(params, base)
        logp_BT, entropy_BT = rows_logprobs(
            policy, params, rows, s.temperature, s.logit_chunk,
            bool(objective.entropy_coef), s.samples,
        )  # fmt: skip
        rows, (logp_BT, entropy_BT) = unpack(rows, logp_BT, entropy_BT)
        moved = rows.old_logp_BT is not None
        old_logp_BT = rows.old_logp_BT if moved else jax.lax.stop_gradient(logp_BT)
        with jax.named_scope("loss"):
            loss_BT, sums = token_loss(objective, logp_BT, entropy_BT, old_logp_BT, rows, exponent)
            total, _ = aggregate(objective, loss_BT, rows.mask_BT)
            drift_BT = jnp.where(rows.mask_BT, jnp.abs(old_logp_BT - rows.sampler_logp_BT), 0)
            sums |= {"drift_mean": drift_BT.sum()}
        return total / count, (total, sums, drift_BT.max())

    def minibatch(base: Any, state: TrainState, batch: LearnerBatch) -> tuple[TrainState, Metrics]:
        mask_BT = batch.mask_BT.reshape(-1, batch.mask_BT.shape[-1])
        if batch.length_B is not None:  # a row for each response
            mask_BT = jnp.arange(mask_BT.shape[1])[None] < batch.length_B.reshape(-1)[:, None]
        tokens = jnp.maximum(mask_BT.sum(), 1).astype(jnp.float32)
        _, count = aggregate(objective, jnp.zeros(mask_BT.shape), mask_BT)
        count = jnp.maximum(count, 1)

        all_rows = dataclasses.replace(batch, used_Z=None)
        of_micro = lambda i: jax.tree.map(lambda x: x[i], all_rows)

        def microbatch(i, carry):
            grads, (total, sums, drift) = carry
            gradient = jax.grad(loss_sum, argnums=(0, 1), has_aux=True)
            more, (more_total, more_sums, more_drift) = at_width(
                s.widths,
                of_micro(i),
                lambda rows: gradient(state.params, state.exponent, rows, count, base),
            )
            grads = sharding.constrain_state(jax.tree.map(jnp.add, grads, more))
            sums = jax.tree.map(jnp.add, sums, more_sums)
            return grads, (total + more_total, sums, jnp.maximum(drift, more_drift))

        report = jax.eval_shape(
            lambda: loss_sum(state.params, state.exponent, of_micro(0), count, base)[1]
        )
        zero = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype), ((state.params, state.exponent), report)
        )
        micros, size, columns = batch.mask_BT.shape
        used = micros if batch.used_Z is None else batch.used_Z
        computed, held = jnp.float32(used) * size * columns, tokens
        if batch.part_Bs is not None:
            held = (batch.part_Bs > 0).sum().astype(jnp.float32)
        if batch.width_ZZ is not None:
            computed = jnp.array(s.widths)[batch.width_ZZ].sum().astype(jnp.float32) * size
        (grads, slope), (total, sums, drift) = jax.lax.fori_loop(0, used, microbatch, zero)
        norm = optax.tree.norm(grads)
        skip = {"not_finite": ~jnp.isfinite(norm + total + slope)}
        warm = (_updates_done(state.opt_state) >= WARM) & bool(s.spike)
        skip["spike"] = warm & (norm > s.spike * state.typical_norm)
        if s.drift:
            skip["drift"] = sums["drift_mean"] > s.drift * tokens
        # optax multiplies its int32 count by floats, which strict promotion would refuse
        with jax.named_scope("optimizer"), jax.numpy_dtype_promotion("standard"):
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
        metrics = {name: x / tokens for name, x in sums.items()}
        metrics |= {
            "loss": total / count,
            "drift_max": drift,
            "grad_norm": norm,
            "lr": jnp.asarray(schedule(_updates_done(state.opt_state)), jnp.float32),
            # of the response columns that were computed, those that hold no trained token; where
            # packed rows are whole, of all columns those that hold no token
            "padding": 1 - held / computed,
        }
        if objective.aggregator == "lambda_grpo":
            metrics["lambda"] = state.exponent
        any_of = functools.partial(functools.reduce, jnp.logical_or)
        skipped = any_of(skip.values())
        counts = {f"skipped/{why}": happened for why, happened in skip.items()}
        metrics |= jax.tree.map(jnp.int32, counts | {"skipped": skipped})
        new = dataclasses.replace(
            state,
            params=params,
            opt_state=opt_state,
            exponent=state.exponent - objective.lambda_lr * slope,
        )
        new = jax.tree.map(lambda old, new: jnp.where(skipped, old, new), state, new)
        # a level that stays high is learnt too, though slowly
        level = jnp.where(skip["spike"], s.spike * state.typical_norm, norm)
        mean = MEMORY * state.typical_norm + (1 - MEMORY) * level
        mean = jnp.where(state.typical_norm == 0, norm, mean)
        counted = (norm > 0) & ~any_of(happened for why, happened in skip.items() if why != "spike")
        typical = jnp.where(counted, mean, state.typical_norm)
        return dataclasses.replace(new, typical_norm=typical), metrics

    # Pinned, since a state laid out otherwise would compile everything again.
    layout = jax.tree.map(lambda x: x.sharding, abstract)

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=(layout, None))
    def update(
        state: TrainState, batch: LearnerBatch, base: Any = None
    ) -> tuple[TrainState, Metrics]:
        if _updates(batch, s) > 1 and batch.old_logp_BT is None:
            raise ValueError("several optimizer updates need old_logp_BT: call old_logprobs first")
        with jax.named_scope("update"):
            learn = functools.partial(minibatch, base)
            epoch = lambda state, _: jax.lax.scan(learn, state, batch)
            state, metrics = jax.lax.scan(epoch, state, length=s.epochs)
            of_step = lambda name, x: (
                x.max() if name == "drift_max" else x.sum() if name in SUMS else x.mean()
            )
            metrics = {name: of_step(name, x) for name, x in metrics.items()}
            return dataclasses.replace(state, step=state.step + 1), metrics

    return update


def _updates_done(opt_state: Any) -> Array:
    """The optimizer's own count of updates."""
    counts = optax.tree.get_all_with_path(opt_state, "count")
    return counts[0][1]
