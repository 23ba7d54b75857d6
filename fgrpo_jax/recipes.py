"""What recipes share, so that a config file says only what is its own."""

from fgrpo_jax import config
from fgrpo_jax.answers import BOXED
from fgrpo_jax.config import Config


def paper(model: str, max_response: int = 8192) -> Config:
    """The LLM runs of the F-GRPO paper (arXiv 2602.06717, section 5.3 and appendix L): DeepScaleR,
    256 prompts of 8 samples a step, four optimizer updates of 64 prompts, at most 1,024 tokens of
    prompt, ten passes over 39,202 problems.

    data/deepscaler.jsonl has the problems whose prompts have at most 1,024 tokens, without
    duplicates that disagree; data/math500.jsonl the held-out ones. The mesh is of 16 chips of v5e.

    Args:
        model: the checkpoint's folder.
        max_response: tokens; the paper: 4,096 for Qwen3-4B-Base, 8,192 for the others.
    """
    c = config.default()
    c.steps = 1530
    c.model.path = model
    c.model.remat = "full"
    c.data.source = "jsonl:data/deepscaler.jsonl"
    c.data.eval_source = "jsonl:data/math500.jsonl"
    c.data.system = BOXED
    c.data.max_prompt = 1024
    c.rollout.prompts = 256
    c.rollout.max_response = max_response
    c.learn.minibatch = 64
    c.learn.microbatch = 8
    c.learn.widths = 4  # an eighth to all of the response columns, as a microbatch needs
    c.mesh.tp = 4
    c.checkpoint.every = c.eval.every = 153  # a pass over the data
    c.eval.problems = 500
    return c


def gsm8k(model: str) -> Config:
    """GSM8K in the paper's way: ten passes over 7,473 problems, 512 + 1,024 tokens."""
    c = config.default()
    c.steps = 290
    c.model.path = model
    c.model.remat = "full"
    c.data.source = "hf:openai/gsm8k:main/train"
    c.data.eval_source = "hf:openai/gsm8k:main/test"
    c.data.system = BOXED
    c.data.max_prompt = 512
    c.reward = "gsm8k"
    c.rollout.prompts = 256
    c.rollout.max_response = 1024
    c.learn.minibatch = 64
    c.learn.microbatch = 32
    c.learn.widths = 3
    c.checkpoint.every = c.eval.every = 29  # a pass over the data
    return c
