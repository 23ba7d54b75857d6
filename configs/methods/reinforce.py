"""REINFORCE: plain policy gradient, no ratio and no clip; verl's `gpg`.

python -m fgrpo_jax.main --config CONFIG --method configs/methods/reinforce.py
"""


def apply(c):
    c.algo.name = "reinforce"
