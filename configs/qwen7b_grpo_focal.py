"""F-GRPO of Qwen2.5-7B with the paper's settings: 256 prompts of 8 samples a step, four optimizer
updates of 64 prompts, 1,024 + 8,192 tokens, gamma 0.5, ten passes over 39,202 problems.

    python -m fgrpo_jax.main --config configs/qwen7b_grpo_focal.py

models/Qwen2.5-7B is the checkpoint's folder, data/deepscaler.jsonl the problems whose prompts have
at most 1,024 tokens, without duplicates that disagree, data/math500.jsonl the held-out ones.
It fits the smallest v5e that can, 16 chips, as it is (18 % free; of v5e-8 state and gradients alone
would take 17.7 GiB a chip). By `python -m fgrpo_jax.plan` at O0, responses 4,096 tokens on average;
the seconds, of rollout and update, are rooflines, so that a real step takes longer:

    hardware  --topology  with --config.           GiB in rollout, update, of   s at best
    v5e-16    v5e:4x4                              12.9  11.1  15.75            406 + 475
    v5e-32    v5e:4x8     rollout.cache_gib=6      12.2   5.5  15.75            155 + 238
    v6e-16    v6e:4x4     rollout.cache_gib=16     25.1  11.1  31.25             93 + 102
    v5p-16    v5p:2x2x2   rollout.cache_gib=48     62.8  21.8  95                82 + 408
    8 x H100  h100:8      rollout.cache_gib=40     54.6  22.5  79.1             181 + 189

On GPUs set XLA_PYTHON_CLIENT_MEM_FRACTION=0.95. The paper's F-GRPO, on 16 H100: math pass@1 38.6
and pass@256 70.3 (GRPO 37.3 and 64.1).
"""

from fgrpo_jax import recipes


def get_config():
    c = recipes.paper("models/Qwen2.5-7B")
    c.algo.focal_gamma = 0.5
    return c
