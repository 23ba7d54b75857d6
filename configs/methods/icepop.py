"""IcePop: tokens on which sampler and trainer differ much leave the loss (arXiv 2510.18855).

python -m fgrpo_jax.main --config CONFIG --method configs/methods/icepop.py
"""


def apply(c):
    c.importance.kind = "mask"
    c.importance.low, c.importance.high = 0.5, 5.0
