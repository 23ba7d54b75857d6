"""GRPO on a real model of 134.5 M parameters: one-digit additions, answered with the number only.

    python -m fgrpo_jax.main --config configs/smollm2_addition.py --config.model.path=FOLDER

FOLDER: SmolLM2-135M-Instruct as a Qwen2 checkpoint. On two CPU cores about half a minute a step;
the mean reward starts near 0.1 and passes 0.6 within ten steps.
"""

from fgrpo_jax import config


def get_config():
    c = config.default()
    c.steps = 20
    c.model.path = "smollm2"
    c.data.source = c.data.eval_source = "arithmetic:1+1"
    c.data.template = "What is {problem}? Answer with the number only."
    c.data.max_prompt = 44
    c.reward = "number"
    c.rollout.prompts = c.learn.minibatch = 8
    c.rollout.max_response = 12
    c.optim.lr = 1e-5
    c.optim.warmup = 2
    c.eval.every = 0
    c.eval.problems = 32
    c.eval.samples = 4
    return c
