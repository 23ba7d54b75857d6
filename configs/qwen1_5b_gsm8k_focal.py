"""F-GRPO of Qwen2.5-1.5B on GSM8K: ten passes over its 7,473 problems, 512 + 1,024 tokens.

    python -m fgrpo_jax.main --config configs/qwen1_5b_gsm8k_focal.py

models/Qwen2.5-1.5B is the checkpoint's folder; the source needs `pip install datasets`. By
`python -m fgrpo_jax.plan` at O0, responses 512 tokens on average; the seconds, of rollout and
update, are rooflines, so that a real step takes longer:

    hardware      --topology  with --config.                         GiB         of     s
    v5e-8         v5e:2x4                                             9.2   6.8  15.75  10 + 31
    2 x RTX 4090  rtx4090:2   learn.microbatch=8 rollout.cache_gib=5 16.7  16.2  23.6   41 + 146
    1 x RTX 4090  rtx4090:1   learn.microbatch=8 rollout.cache_gib=8 14.2  11.2  23.6   69 + 234

One GPU of 24 GB cannot train all of 1.5B: float32 weights, their moments and a gradient are 23 GiB.
The last row is with --method configs/methods/lora.py, which trains adapters. On GPUs set
XLA_PYTHON_CLIENT_MEM_FRACTION=0.95.
"""

from fgrpo_jax import recipes


def get_config():
    c = recipes.gsm8k("models/Qwen2.5-1.5B")
    c.algo.focal_gamma = 0.5
    return c
