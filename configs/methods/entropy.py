"""Entropy bonus: the paper's control, coefficient 1e-3.

python -m fgrpo_jax.main --config CONFIG --method configs/methods/entropy.py
"""


def apply(c):
    c.algo.entropy_coef = 1e-3
