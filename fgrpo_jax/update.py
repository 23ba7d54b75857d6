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

from fgrpo_jax import losses, sharding
from fgrpo_jax.logprobs import response_logprobs
from fgrpo_jax.model import Policy
from fgrpo_jax.structs import LearnerBatch, TrainState

Metrics = dict[str, Array]


@dataclasses.dataclass(frozen=True)
class UpdateSettings:
    """What is static in an update."""

    surrogate: str  # grpo, dapo, cispo, or sft for maximum likelihood
    clip_low: float
    clip_high: float
    dual_clip: float  # 0: none
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
    return TrainState(params, optimizer.init(params), jnp.int32(0))


def make_update(
    policy: Policy,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    settings: UpdateSettings,
    abstract: TrainState,
) -> Callable[[TrainState, LearnerBatch], tuple[TrainState, Metrics]]:
    """The jitted update(state, batch) -> state, metrics; the state is donated.

    Each minibatch is one optimizer update. Its loss is the sum over all its tokens divided once
    by their number, whatever microbatches and devices it is spread over. Old log-probabilities
    are those of the parameters before the first minibatch.
    """
    s = settings

    def logprobs(params: Any, rows: LearnerBatch) -> tuple[Array, Array]:
        response = rows.mask_BT.shape[-1]
        return response_logprobs(
            policy, params, rows.tokens_BS, rows.start_B, response, s.temperature, s.logit_chunk
        )

    def surrogate(logp_BT: Array, old_logp_BT: Array, advantage_B1: Array) -> Array:
        if s.surrogate == "sft":
            return losses.policy_gradient(logp_BT, advantage_B1)
        if s.surrogate == "cispo":
            return losses.cispo(logp_BT, old_logp_BT, advantage_B1, s.clip_low, s.clip_high)
        return losses.ppo_clip(
            logp_BT, old_logp_BT, advantage_B1, s.clip_low, s.clip_high, s.dual_clip
        )

    def loss_sum(params, rows: LearnerBatch, old_logp_BT, count):
        """This microbatch's share of the minibatch's loss, and sums over its tokens."""
        logp_BT, entropy_BT = logprobs(params, rows)
        with jax.named_scope("loss"):
            quiet_BT = jax.lax.stop_gradient(logp_BT)
            old_logp_BT = quiet_BT if old_logp_BT is None else old_logp_BT
            advantage_B1 = rows.advantage_B[:, None]
            loss_BT = surrogate(logp_BT, old_logp_BT, advantage_B1)
            total, _ = losses.token_mean(loss_BT, rows.mask_BT)
            clipped = lambda sign: losses.is_clipped(
                quiet_BT, old_logp_BT, sign, s.clip_low, s.clip_high
            )
            clipped_BT = clipped(advantage_B1)
            if s.surrogate == "cispo":  # it clips the weight whatever the advantage's sign
                clipped_BT = clipped(jnp.ones_like(logp_BT)) | clipped(-jnp.ones_like(logp_BT))
            drift_BT = jnp.where(rows.mask_BT, jnp.abs(old_logp_BT - rows.sampler_logp_BT), 0)
            token_sum = lambda x_BT: losses.token_mean(x_BT, rows.mask_BT)[0]
            sums = {
                "loss": total,
                "entropy": token_sum(entropy_BT),
                "clip_fraction": token_sum(clipped_BT.astype(jnp.float32)),
                "approx_kl": token_sum(old_logp_BT - quiet_BT),
                "drift_mean": drift_BT.sum(),
            }
        return total / count, (sums, drift_BT.max())

    def minibatch(state: TrainState, xs) -> tuple[TrainState, Metrics]:
        batch, old_logp = xs
        count = jnp.maximum(batch.mask_BT.sum(), 1).astype(jnp.float32)

        def microbatch(carry, xs):
            grads, sums, drift = carry
            rows, old_logp_BT = xs
            (_, (more, most)), more_grads = jax.value_and_grad(loss_sum, has_aux=True)(
                state.params, rows, old_logp_BT, count
            )
            add = functools.partial(jax.tree.map, jnp.add)
            grads = sharding.constrain_state(add(grads, more_grads))
            return (grads, add(sums, more), jnp.maximum(drift, most)), None

        names = ("loss", "entropy", "clip_fraction", "approx_kl", "drift_mean")
        zero = (
            jax.tree.map(jnp.zeros_like, state.params),
            dict.fromkeys(names, jnp.float32(0)),
            jnp.float32(0),
        )
        (grads, sums, drift), _ = jax.lax.scan(microbatch, zero, (batch, old_logp))
        # optax multiplies its int32 count by floats, which strict promotion would refuse
        with jax.named_scope("optimizer"), jax.numpy_dtype_promotion("standard"):
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
        metrics = {name: total / count for name, total in sums.items()}
        metrics |= {
            "drift_max": drift,
            "grad_norm": optax.tree.norm(grads),
            "lr": jnp.asarray(schedule(_updates_done(state.opt_state)), jnp.float32),
        }
        return dataclasses.replace(state, params=params, opt_state=opt_state), metrics

    # Pinned, since a state laid out otherwise would compile everything again.
    layout = jax.tree.map(lambda x: x.sharding, abstract)

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=(layout, None))
    def update(state: TrainState, batch: LearnerBatch) -> tuple[TrainState, Metrics]:
        with jax.named_scope("update"):
            old_logp = None
            if batch.mask_BT.shape[0] * s.epochs > 1 and s.surrogate != "sft":
                old_logp = jax.lax.map(
                    lambda minis: jax.lax.map(lambda rows: logprobs(state.params, rows)[0], minis),
                    batch,
                )
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
