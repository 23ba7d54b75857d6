"""Rewarding the Unlikely: likely right samples are paid less (arXiv 2506.02355).

Its other remedy, two passes over each step's rollouts, is set too.

    python -m fgrpo_jax.main --config CONFIG --method configs/methods/unlikeliness.py
"""


def apply(c):
    c.score.unlikeliness = 0.25
    c.learn.epochs = 2
    c.kl.coef = 0.1
