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

from fgrpo_jax import sharding
from fgrpo_jax.logprobs import batch_logprobs, response_logprobs
from fgrpo_jax.model import Policy
from fgrpo_jax.objective import Objective, aggregate, token_loss
from fgrpo_jax.structs import LearnerBatch, TrainState

Metrics = dict[str, Array]


@dataclasses.dataclass(frozen=True)
class UpdateSettings:
    """What is static in an update."""

    objective: Objective
    temperature: float  # of the sampler
    epochs: int  # passes over the batch
    logit_chunk: int  # response tokens whose logits are in memory at a time


def abstract_state(
    policy: Policy, optimizer: optax.GradientTransformation, mesh: Mesh
) -> TrainState:
    """Shapes and shardings of the state: optimizer state lies as its weights."""
    params = jax.eval_shape(policy.init, jax.random.key(0))
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
    return TrainState(params, optimizer.init(params), zero, zero, jnp.float32(0))


def make_update(
    policy: Policy,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    settings: UpdateSettings,
    abstract: TrainState,
) -> Callable[[TrainState, LearnerBatch], tuple[TrainState, Metrics]]:
    """The jitted update(state, batch) -> state, metrics; the state is donated.

    Each minibatch is one optimizer update. Its loss is the aggregator's sum over all its rows
    divided once by the aggregator's count, whatever microbatches and devices it is spread over.
    Old log-probabilities are those of the parameters before the first minibatch.
    """
    s, objective = settings, settings.objective

    def logprobs(params: Any, rows: LearnerBatch) -> tuple[Array, Array]:
        response = rows.mask_BT.shape[-1]
        return response_logprobs(
            policy,
            params,
            rows.tokens_BS,
            rows.start_B,
            response,
            s.temperature,
            s.logit_chunk,
            entropy_gradient=bool(objective.entropy_coef),
        )

    def loss_sum(params, exponent, rows: LearnerBatch, old_logp_BT, count):
        """This microbatch's share of the minibatch's loss, and sums over its tokens."""
        logp_BT, entropy_BT = logprobs(params, rows)
        with jax.named_scope("loss"):
            quiet_BT = jax.lax.stop_gradient(logp_BT)
            old_logp_BT = quiet_BT if old_logp_BT is None else old_logp_BT
            loss_BT, sums = token_loss(objective, logp_BT, entropy_BT, old_logp_BT, rows, exponent)
            total, _ = aggregate(objective, loss_BT, rows.mask_BT)
            drift_BT = jnp.where(rows.mask_BT, jnp.abs(old_logp_BT - rows.sampler_logp_BT), 0)
            sums |= {"drift_mean": drift_BT.sum()}
        return total / count, (total, sums, drift_BT.max())

    def minibatch(state: TrainState, xs) -> tuple[TrainState, Metrics]:
        batch, old_logp = xs
        mask_BT = batch.mask_BT.reshape(-1, batch.mask_BT.shape[-1])
        tokens = jnp.maximum(mask_BT.sum(), 1).astype(jnp.float32)
        _, count = aggregate(objective, jnp.zeros(mask_BT.shape), mask_BT)
        count = jnp.maximum(count, 1)

        def microbatch(grads, xs):
            more, report = jax.grad(loss_sum, argnums=(0, 1), has_aux=True)(
                state.params, state.exponent, *xs, count
            )
            return sharding.constrain_state(jax.tree.map(jnp.add, grads, more)), report

        zero = jax.tree.map(jnp.zeros_like, (state.params, state.exponent))
        (grads, slope), (total, sums, drift) = jax.lax.scan(microbatch, zero, (batch, old_logp))
        # optax multiplies its int32 count by floats, which strict promotion would refuse
        with jax.named_scope("optimizer"), jax.numpy_dtype_promotion("standard"):
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
        metrics = {name: x.sum() / tokens for name, x in sums.items()}
        metrics |= {
            "loss": total.sum() / count,
            "drift_max": drift.max(),
            "grad_norm": optax.tree.norm(grads),
            "lr": jnp.asarray(schedule(_updates_done(state.opt_state)), jnp.float32),
        }
        if objective.aggregator == "lambda_grpo":
            metrics["lambda"] = state.exponent
        exponent = state.exponent - objective.lambda_lr * slope
        new = {"params": params, "opt_state": opt_state, "exponent": exponent}
        return dataclasses.replace(state, **new), metrics

    # Pinned, since a state laid out otherwise would compile everything again.
    layout = jax.tree.map(lambda x: x.sharding, abstract)

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=(layout, None))
    def update(state: TrainState, batch: LearnerBatch) -> tuple[TrainState, Metrics]:
        with jax.named_scope("update"):
            old_logp = None
            if batch.mask_BT.shape[0] * s.epochs > 1:
                old_logp = batch_logprobs(policy, state.params, batch, s.temperature, s.logit_chunk)
            # With one optimizer update a step the policy is still the one that sampled.
            epoch = lambda state, _: jax.lax.scan(minibatch, state, (batch, old_logp))
            state, metrics = jax.lax.scan(epoch, state, length=s.epochs)
            worst = {"drift_max"}
            metrics = {name: x.max() if name in worst else x.mean() for name, x in metrics.items()}
            return dataclasses.replace(state, step=state.step + 1), metrics

    return update


def _updates_done(opt_state: Any) -> Array:
    """The optimizer's own count of updates."""
    counts = optax.tree.get_all_with_path(opt_state, "count")
    return counts[0][1]
