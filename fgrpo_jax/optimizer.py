"""The optax chain and its schedule."""

import optax

from fgrpo_jax.config import Config


def make_schedule(optim: Config, updates_a_step: int) -> optax.Schedule:
    """The learning rate by optimizer updates done: linear rise, constant, linear fall if any.

    The rise is counted in updates, as the paper's is, the fall in rollout steps, so that a method
    of more updates a step ends it with the run.
    The first update already has lr / warmup, so that none is wasted.
    """
    rise = optax.linear_schedule(optim.lr / max(optim.warmup, 1), optim.lr, optim.warmup - 1)
    if not optim.decay_end:
        return rise
    steps = optim.decay_end - optim.decay_start
    fall = optax.linear_schedule(optim.lr, 0.0, steps * updates_a_step)
    return optax.join_schedules([rise, fall], [optim.decay_start * updates_a_step])


def make_optimizer(optim: Config, schedule: optax.Schedule) -> optax.GradientTransformation:
    """AdamW on gradients clipped by their global norm.

    The second moment is float32: bfloat16's 8 bits would lose what b2 = 0.999 adds a step. The
    first moves by a tenth, which they hold.
    """
    return optax.chain(
        optax.clip_by_global_norm(optim.clip_norm),
        optax.adamw(
            schedule,
            b1=optim.b1,
            b2=optim.b2,
            weight_decay=optim.weight_decay,
            mu_dtype=optim.first_moment,
        ),
    )
