"""GSPO-token: the sequence's ratio in value, the token's in gradient (arXiv 2507.18071).

python -m fgrpo_jax.main --config CONFIG --method configs/methods/gspo_token.py
"""


def apply(c):
    c.algo.name = "gspo_token"
    c.learn.minibatch = c.rollout.prompts // 4
