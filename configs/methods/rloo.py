"""RLOO: each reward against the mean of the others (arXiv 2402.14740).

python -m fgrpo_jax.main --config CONFIG --method configs/methods/rloo.py
"""


def apply(c):
    c.algo.advantage = "rloo"
