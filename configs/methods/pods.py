"""PODS: of 4 N samples a prompt, the N whose rewards vary most are trained (arXiv 2504.13818).

The focal weight is of all 4 N.

    python -m fgrpo_jax.main --config CONFIG --method configs/methods/pods.py
"""


def apply(c):
    c.rollout.subset = c.algo.group_size
    c.algo.group_size *= 4
    c.algo.std_eps = 1e-4
