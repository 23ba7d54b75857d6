"""DAPO's soft overlong punishment over the last fifth of the limit (arXiv 2503.14476).

The paper: 4,096 of 20,480 tokens.

    python -m fgrpo_jax.main --config CONFIG --method configs/methods/overlong.py
"""


def apply(c):
    c.score.overlong_buffer = max(c.rollout.max_response // 5, 1)
    c.score.overlong_factor = 1.0
