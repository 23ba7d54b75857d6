"""F-CISPO: qwen7b_cispo.py with the focal weight, gamma 1.

    python -m fgrpo_jax.main --config configs/qwen7b_cispo_focal.py

Model, data, hardware, memory and times as in qwen7b_grpo_focal.py. The paper's F-CISPO: math pass@1
39.5 and pass@256 76.8.
"""

from fgrpo_jax import recipes


def get_config():
    c = recipes.paper("models/Qwen2.5-7B")
    c.algo.name = "cispo"  # weights in [0, 6]
    c.algo.focal_gamma = 1.0
    return c
