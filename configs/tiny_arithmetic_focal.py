"""F-GRPO on the embedded arithmetic policy, on two CPU cores."""

from fgrpo_jax import config


def get_config():
    c = config.default()
    c.steps = 200
    c.optim.lr = 5e-4
    c.algo.focal_gamma = 0.5
    return c
