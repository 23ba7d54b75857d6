"""The supervised warm start that made fgrpo_jax/assets/tiny_arithmetic.

    python -m fgrpo_jax.sft --config configs/tiny_arithmetic_sft.py

Two CPU cores: about ten minutes; the loss ends near 0.15 nats a token. The worked solutions hold
slips, as scraped ones do, so that RL with verified answers has something to put right.
"""

from fgrpo_jax import config


def get_config():
    c = config.default()
    c.sft.out = "fgrpo_jax/assets/tiny_arithmetic"
    c.sft.steps = 2000
    c.sft.slips = 0.4
    c.optim.lr = 2e-3
    c.checkpoint.every = 500
    return c
