"""Two steps of any run on a laptop's CPU in under a minute: the embedded model, mental arithmetic
and small sizes. Algorithm, penalties, optimizer and updates a step stay as they are.

    python -m fgrpo_jax.main --config CONFIG --method configs/methods/smoke.py

Given last, behind other methods, whose sizes it cuts too. 34 to 47 CPU-seconds, most of them to
compile.
"""

from fgrpo_jax import config


def apply(c):
    small = config.default()
    c.steps = 2
    for key in "path attention".split():
        c.model[key] = small.model[key]
    for key in "source eval_source fields system chat_template template max_prompt".split():
        c.data[key] = small.data[key]
    c.reward = small.reward
    c.kl.reference = small.kl.reference

    samples, most = c.rollout.subset or c.algo.group_size, c.rollout.max_response
    whole = c.learn.microbatch >= c.learn.minibatch * samples  # a minibatch at a time
    c.rollout.prompts = c.rollout.prompts // c.learn.minibatch * 2  # as many updates as before
    c.learn.minibatch = 2
    c.learn.microbatch = samples * (2 if whole else 1)
    c.rollout.max_response = small.rollout.max_response
    c.rollout.slots = 0
    c.learn.logit_chunk = 16
    if c.learn.pack:
        c.learn.pack = 2 * c.rollout.max_response
    if c.score.overlong_buffer:
        c.score.overlong_buffer = max(1, c.score.overlong_buffer * c.rollout.max_response // most)

    c.mesh.replica, c.mesh.fsdp, c.mesh.tp = 1, -1, 1
    c.checkpoint.folder = c.profile.steps = ""
    c.checkpoint.best = c.checkpoint.best and "pass@1"
    c.eval.problems, c.eval.samples = 8, 4
