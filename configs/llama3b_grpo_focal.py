"""F-GRPO of Llama-3.2-3B-Instruct with the paper's settings: as qwen7b_grpo_focal.py, gamma 0.5.

    python -m fgrpo_jax.main --config configs/llama3b_grpo_focal.py

models/Llama-3.2-3B-Instruct is the checkpoint's folder, data/ as there. Its chat template has the
day's date: a run that goes on another day has other prompts, but with a copy of the template whose
date is fixed, as data.chat_template. By `python -m fgrpo_jax.plan` at O0, responses 4,096 tokens on
average; the seconds, of rollout and update, are rooflines, so that a real step takes longer:

    hardware  --topology  with --config.           GiB in rollout, update, of   s at best
    v5e-8     v5e:2x4     rollout.cache_gib=7      13.0  10.6  15.75            757 + 474

The paper's F-GRPO, on 16 H100: math pass@1 23.0 and pass@256 63.4 (GRPO 23.0 and 59.9).
"""

from fgrpo_jax import recipes


def get_config():
    c = recipes.paper("models/Llama-3.2-3B-Instruct")
    c.algo.focal_gamma = 0.5
    return c
