"""F-GRPO on mazes of 9 x 9 squares, from the warm start of configs/maze/small_sft.py, on a CPU.

    python -m fgrpo_jax.main --config configs/maze/small_rl.py --workdir runs/small_maze_focal_1_0 \
        --config.algo.focal_gamma=1 --config.seed=0

256 samples of each of 128 held-out mazes, so that pass@256 can be told, five times in the run. On
two CPU cores that are busy with other work a step takes a second, an evaluation about one minute.
"""

from fgrpo_jax import config


def get_config():
    c = config.default()
    c.steps = 240
    c.model.path = "runs/small_maze_start"
    c.data.source = "maze:9x32768"
    c.data.eval_source = "maze:9x128"
    c.data.max_prompt = 96
    c.reward = "maze"
    c.algo.focal_gamma = 0.5
    c.rollout.max_response = 32
    c.rollout.slots = 512  # what a CPU's cache holds: evaluations are twice as fast
    c.optim.lr = 1e-4
    c.checkpoint.every = 60
    c.eval.every = 60
    c.eval.samples = 256
    c.eval.problems = 128
    return c
