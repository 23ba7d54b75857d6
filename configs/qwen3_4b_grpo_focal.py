"""F-GRPO of Qwen3-4B-Base with the paper's settings: as qwen7b_grpo_focal.py, but at most 4,096
tokens of response, gamma 0.5.

    python -m fgrpo_jax.main --config configs/qwen3_4b_grpo_focal.py

models/Qwen3-4B-Base is the checkpoint's folder, data/ as there. Thinking is on, in training and in
evaluations: it is what Qwen3's chat template does where it is not told otherwise. By
`python -m fgrpo_jax.plan` at O0, responses 2,048 tokens on average; the seconds, of rollout and
update, are rooflines, so that a real step takes longer:

    hardware  --topology  with --config.           GiB in rollout, update, of   s at best
    v5e-8     v5e:2x4     rollout.cache_gib=5.5    13.2  11.1  15.75            372 + 313
    8 x H100  h100:8      rollout.cache_gib=40     48.5  11.3  79.1             126 +  62

On GPUs set XLA_PYTHON_CLIENT_MEM_FRACTION=0.95. The paper's F-GRPO, on 16 H100: math pass@1 42.7
and pass@256 76.0 (GRPO 39.9 and 71.1).
"""

from fgrpo_jax import recipes


def get_config():
    c = recipes.paper("models/Qwen3-4B-Base", max_response=4096)
    c.algo.focal_gamma = 0.5
    return c
