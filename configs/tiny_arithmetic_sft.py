"""Warm start."""

from fgrpo_jax import config


def get_config():
    c = config.default()
    c.sft.out = "fgrpo_jax/assets/tiny_arithmetic"
    c.sft.steps = 2000
    c.sft.slips = 0.2
    c.optim.lr = 2e-3
    c.checkpoint.every = 300
    return c
