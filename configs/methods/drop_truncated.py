"""Cut-off samples leave the loss and their group's statistics.

python -m fgrpo_jax.main --config CONFIG --method configs/methods/drop_truncated.py
"""


def apply(c):
    c.algo.truncated = "drop"
