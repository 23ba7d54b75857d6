"""DISCO: rewards weighted by domain and difficulty, no deviation (arXiv 2505.15074).

python -m fgrpo_jax.main --config CONFIG --method configs/methods/disco.py
"""


def apply(c):
    c.algo.advantage = "disco"
    c.algo.domain_weight = "log"
    c.kl.coef = 1e-3
