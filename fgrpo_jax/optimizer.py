"""The optax chain and its schedule."""

import optax

from fgrpo_jax.config import Config


def make_schedule(optim: Config) -> optax.Schedule:
    """The learning rate by optimizer update: linear warm-up, then constant."""
    if not optim.warmup:
        return optax.constant_schedule(optim.lr)
    return optax.schedules.linear_schedule(optim.lr / optim.warmup, optim.lr, optim.warmup - 1 or 1)


def make_optimizer(optim: Config) -> optax.GradientTransformation:
    """AdamW on gradients clipped by their global norm; the moments are float32 as the weights."""
    return optax.chain(
        optax.clip_by_global_norm(optim.clip_norm),
        optax.adamw(
            make_schedule(optim), b1=optim.b1, b2=optim.b2, weight_decay=optim.weight_decay
        ),
    )
