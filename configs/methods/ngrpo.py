"""NGRPO: a virtual right sample in each group; all-wrong groups teach too (arXiv 2509.18851).

python -m fgrpo_jax.main --config CONFIG --method configs/methods/ngrpo.py
"""


def apply(c):
    c.algo.advantage = "ngrpo"
    c.algo.clip_low, c.algo.clip_high = 0.16, 0.24
