"""TIS by sequence: the product of a sequence's ratios, at most 2; verl's level "sequence".

python -m fgrpo_jax.main --config CONFIG --method configs/methods/tis_sequence.py
"""


def apply(c):
    c.importance.kind = "truncate"
    c.importance.level = "sequence"
    c.importance.high = 2.0
