"""qwen1_5b_gsm8k_focal.py for Qwen2.5-0.5B, all of which one GPU of 24 GB can train.

    python -m fgrpo_jax.main --config configs/qwen0_5b_gsm8k_focal.py

models/Qwen2.5-0.5B is the checkpoint's folder; the source needs `pip install datasets`. By
`python -m fgrpo_jax.plan` at O0, responses 512 tokens on average; the seconds, of rollout and
update, are rooflines, so that a real step takes longer:

    hardware      --topology  with --config.        GiB in rollout, update, of  s at best
    1 x RTX 4090  rtx4090:1   rollout.cache_gib=8   14.0  18.9  23.6            24 + 92
    v5e-4         v5e:2x2     learn.microbatch=32   13.4   7.6  15.75            5 + 19

On GPUs set XLA_PYTHON_CLIENT_MEM_FRACTION=0.95. Its score is not in the paper.
"""

from fgrpo_jax import recipes


def get_config():
    c = recipes.gsm8k("models/Qwen2.5-0.5B")
    c.algo.focal_gamma = 0.5
    c.learn.microbatch = 16
    return c
