"""The baseline of qwen7b_grpo_focal.py: GRPO without the focal weight.

    python -m fgrpo_jax.main --config configs/qwen7b_grpo.py

Model, data, hardware, memory and times as there. The paper's GRPO: math pass@1 37.3 and pass@256
64.1.
"""

from fgrpo_jax import recipes


def get_config():
    c = recipes.paper("models/Qwen2.5-7B")
    c.algo.focal_gamma = 0.0
    return c
