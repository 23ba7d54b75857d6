"""Whole sequences on which sampler and trainer differ leave the loss: TRL's `sequence_mask`.

python -m fgrpo_jax.main --config CONFIG --method configs/methods/masked_sequence.py
"""


def apply(c):
    c.importance.kind = "mask"
    c.importance.level = "sequence"
    c.importance.low, c.importance.high = 0.0, 3.0
