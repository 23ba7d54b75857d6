"""CISPO: clipped importance weights in place of a clipped loss (arXiv 2506.13585).

ScaleRL's and F-GRPO's bounds: weights in [0, 6].

    python -m fgrpo_jax.main --config CONFIG --method configs/methods/cispo.py
"""


def apply(c):
    c.algo.name = "cispo"  # bounds 1 and 5
