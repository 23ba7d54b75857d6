"""Rewards by a coin, not by the answers: what a run gains even so (arXiv 2506.10947, 2507.10532).

Qwen2.5 gains on MATH-500. pass_rate and evaluations stay those of the answers; the focal weight,
which is of them too, is off.

    python -m fgrpo_jax.main --config CONFIG --method configs/methods/random_rewards.py
"""


def apply(c):
    c.score.coin = 0.5
    c.algo.focal_gamma = 0.0
