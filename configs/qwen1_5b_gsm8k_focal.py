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

from fgrpo_jax import config


def get_config():
    c = config.default()
    c.steps = 290
    c.model.path = "models/Qwen2.5-1.5B"
    c.model.remat = "full"
    c.data.source = "hf:openai/gsm8k:main/train"
    c.data.eval_source = "hf:openai/gsm8k:main/test"
    c.data.system = r"Please reason step by step, and put your final answer within \boxed{}."
    c.data.max_prompt = 512
    c.reward = "gsm8k"
    c.rollout.prompts = 256
    c.rollout.max_response = 1024
    c.learn.minibatch = 64
    c.learn.microbatch = 32
    c.learn.widths = 3
    c.checkpoint.every = c.eval.every = 29  # a pass over the data
    return c
