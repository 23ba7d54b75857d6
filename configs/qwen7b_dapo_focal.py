"""F-DAPO: qwen7b_dapo.py with the focal weight, gamma 0.5.

    python -m fgrpo_jax.main --config configs/qwen7b_dapo_focal.py

Model, data, hardware, memory and times as in qwen7b_grpo_focal.py. The paper's F-DAPO: math pass@1
40.5 and pass@256 72.5.
"""

from fgrpo_jax import recipes


def get_config():
    c = recipes.paper("models/Qwen2.5-7B")
    c.algo.name = "dapo"  # bounds 0.2 and 0.28
    c.algo.focal_gamma = 0.5
    return c
