"""qwen7b_grpo.py with CISPO's clipped importance weights, with ScaleRL's bounds.

    python -m fgrpo_jax.main --config configs/qwen7b_cispo.py

Model, data, hardware, memory and times as in qwen7b_grpo_focal.py. The paper's CISPO: math pass@1
39.5 and pass@256 73.2.
"""

from fgrpo_jax import recipes


def get_config():
    c = recipes.paper("models/Qwen2.5-7B")
    c.algo.name = "cispo"  # weights in [0, 6]
    c.algo.focal_gamma = 0.0
    return c
