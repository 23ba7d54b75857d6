"""PKPO: what a sample adds to the best of k (arXiv 2505.15201).

python -m fgrpo_jax.main --config CONFIG --method configs/methods/pkpo.py
"""


def apply(c):
    c.algo.advantage = "pkpo"
    c.algo.pass_k = 4
