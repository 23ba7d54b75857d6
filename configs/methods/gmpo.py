"""GMPO: the geometric mean of token ratios, clipped to exp(+-0.4) (arXiv 2507.20673).

python -m fgrpo_jax.main --config CONFIG --method configs/methods/gmpo.py
"""


def apply(c):
    c.algo.name = "gmpo"
    c.learn.minibatch = c.rollout.prompts // 4
