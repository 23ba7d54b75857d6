"""F-GRPO on the paper's mazes of 17 x 17 (section 5.2), from the warm start of configs/maze/sft.py.

    python -m fgrpo_jax.main --config configs/maze/rl.py --workdir runs/maze_n8_focal_1 \
        --config.algo.group_size=8 --config.algo.focal_gamma=1 --config.seed=0

The paper has N of 4, 8, 16, 32, 64 and 128 (algo.group_size) and gamma of 0, 0.5 and 1
(algo.focal_gamma). For GPUs; the million mazes take some minutes to make and tokenise, and 3 GB.
At N = 8 the paper ends at pass@1 of 72.2 %, 83.4 % and 76.3 % with these gammas.
"""

from fgrpo_jax import config


def get_config():
    c = config.default()
    c.steps = 20_000
    c.model.path = "runs/maze_start"
    c.data.source = "maze:17x1000000"
    c.data.eval_source = "maze:17x256"
    c.data.max_prompt = 320
    c.reward = "maze"
    c.algo.group_size = 8
    c.algo.focal_gamma = 0.5
    c.rollout.prompts = 256
    c.rollout.max_response = 180
    c.learn.minibatch = 256
    c.learn.microbatch = 512
    c.optim.lr = 1e-4
    c.optim.warmup = 0
    c.checkpoint.every = 250
    c.eval.every = 250
    c.eval.samples = 2048
    c.eval.problems = 256
    return c
