"""qwen7b_grpo_focal.py for Qwen2.5-72B, on 64 chips of v5p.

    python -m fgrpo_jax.main --config configs/qwen72b_grpo_focal.py

models/Qwen2.5-72B and data/ as there. v5p-128 by `python -m fgrpo_jax.plan --topology v5p:4x4x4` at
O0, responses 4,096 tokens on average: 81.5 GiB in the rollout and 25.4 in the update, of 95; 261 +
497 s a step at best, by rooflines.
"""

from fgrpo_jax import config


def get_config():
    c = config.default()
    c.steps = 1530
    c.model.path = "models/Qwen2.5-72B"
    c.model.remat = "full"
    c.data.source = "jsonl:data/deepscaler.jsonl"
    c.data.eval_source = "jsonl:data/math500.jsonl"
    c.data.system = r"Please reason step by step, and put your final answer within \boxed{}."
    c.data.max_prompt = 1024
    c.rollout.prompts = 256
    c.rollout.max_response = 8192
    c.rollout.cache_gib = 24.0
    c.learn.minibatch = 64
    c.learn.microbatch = 16
    c.learn.widths = 4
    c.mesh.tp = 4
    c.checkpoint.every = c.eval.every = 153  # a pass over the data
    c.eval.problems = 500
    return c
