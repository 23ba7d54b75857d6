"""GSPO: one ratio a sequence, with the bounds of Qwen's paper (arXiv 2507.18071).

python -m fgrpo_jax.main --config CONFIG --method configs/methods/gspo.py
"""


def apply(c):
    c.algo.name = "gspo"  # bounds 3e-4 and 4e-4, the sequence mean of token means
    c.learn.minibatch = c.rollout.prompts // 4  # the paper splits a step's rollouts into four
