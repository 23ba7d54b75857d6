"""qwen7b_grpo_focal.py for Qwen2.5-72B, on 64 chips of v5p.

    python -m fgrpo_jax.main --config configs/qwen72b_grpo_focal.py

models/Qwen2.5-72B and data/ as there. v5p-128 by `python -m fgrpo_jax.plan --topology v5p:4x4x4` at
O0, responses 4,096 tokens on average: 81.5 GiB in the rollout and 25.4 in the update, of 95; 261 +
497 s a step at best, by rooflines.
"""

from fgrpo_jax import recipes


def get_config():
    c = recipes.paper("models/Qwen2.5-72B")
    c.algo.focal_gamma = 0.5
    c.rollout.cache_gib = 24.0
    c.learn.microbatch = 16
    return c
