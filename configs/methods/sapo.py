"""SAPO: a soft gate in place of the clip (arXiv 2511.20347).

python -m fgrpo_jax.main --config CONFIG --method configs/methods/sapo.py
"""


def apply(c):
    c.algo.name = "sapo"  # temperatures 1 and 1.05
    c.learn.minibatch = c.rollout.prompts // 4
