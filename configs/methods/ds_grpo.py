"""DS-GRPO: likely right samples learn less, unlikely wrong ones lose more (arXiv 2511.19942).

MaxRL's coefficients.

    python -m fgrpo_jax.main --config CONFIG --method configs/methods/ds_grpo.py
"""


def apply(c):
    c.algo.advantage = "ds_grpo"
    c.algo.smooth_right = c.algo.smooth_wrong = 0.05
