"""DAPO's clip-higher: a wider upper bound lets rare tokens grow (arXiv 2503.14476).

Its dynamic sampling and overlong shaping are dynamic_sampling.py and overlong.py.

    python -m fgrpo_jax.main --config CONFIG --method configs/methods/dapo.py
"""


def apply(c):
    c.algo.name = "dapo"  # bounds 0.2 and 0.28
