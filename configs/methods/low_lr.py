"""A lower learning rate: the paper's control for the focal weight's smaller advantages, 6.8e-7.

The weight is not renormalised, so that F-GRPO's updates are smaller than GRPO's on average.

    python -m fgrpo_jax.main --config configs/qwen7b_grpo.py --method configs/methods/low_lr.py
"""


def apply(c):
    c.optim.lr = 6.8e-7
