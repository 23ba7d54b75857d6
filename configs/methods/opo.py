"""OPO: the baseline weighs rewards by length; exactly on-policy (arXiv 2505.23585).

python -m fgrpo_jax.main --config CONFIG --method configs/methods/opo.py
"""


def apply(c):
    c.algo.advantage = "opo"
    c.learn.minibatch = c.rollout.prompts
