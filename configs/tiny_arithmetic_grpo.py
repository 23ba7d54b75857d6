"""The baseline of tiny_arithmetic_focal.py: plain GRPO, without the focal weight.

    python -m fgrpo_jax.main --config configs/tiny_arithmetic_grpo.py

Two CPU cores: three to four minutes.
"""

from fgrpo_jax import config


def get_config():
    c = config.default()
    c.steps = 200
    c.optim.lr = 5e-4
    c.optim.decay_start, c.optim.decay_end = 100, 200
    c.algo.focal_gamma = 0.0
    return c
