"""Cut-off samples leave the loss: DAPO's overlong filtering, TRL's `mask_truncated_completions`.

python -m fgrpo_jax.main --config CONFIG --method configs/methods/mask_truncated.py
"""


def apply(c):
    c.algo.truncated = "mask"
