"""qwen7b_grpo.py with DAPO's clip-higher; as in the paper, without its dynamic sampling and
overlong shaping.

    python -m fgrpo_jax.main --config configs/qwen7b_dapo.py

Model, data, hardware, memory and times as in qwen7b_grpo_focal.py. The paper's DAPO: math pass@1
39.4 and pass@256 69.3.
"""

from fgrpo_jax import recipes


def get_config():
    c = recipes.paper("models/Qwen2.5-7B")
    c.algo.name = "dapo"  # bounds 0.2 and 0.28
    c.algo.focal_gamma = 0.0
    return c
