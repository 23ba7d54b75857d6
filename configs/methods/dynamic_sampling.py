"""DAPO's dynamic sampling: groups all right or all wrong are drawn again (arXiv 2503.14476).

python -m fgrpo_jax.main --config CONFIG --method configs/methods/dynamic_sampling.py
"""


def apply(c):
    c.rollout.dynamic = True
    c.rollout.attempts = 10
