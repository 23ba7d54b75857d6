"""Rewards centred by group and divided by the batch's deviation (arXiv 2508.08221).

TRL's `scale_rewards="batch"`, with its eps.

    python -m fgrpo_jax.main --config CONFIG --method configs/methods/batch_std.py
"""


def apply(c):
    c.algo.advantage = "batch_std"
    c.algo.std_eps = 1e-4
