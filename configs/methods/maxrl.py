"""MaxRL: the centred reward over the group's mean (arXiv 2602.02710).

python -m fgrpo_jax.main --config CONFIG --method configs/methods/maxrl.py
"""


def apply(c):
    c.algo.advantage = "maxrl"
