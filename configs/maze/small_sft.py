"""The warm start of the reduced mazes, of 9 x 9 squares, on a CPU.

    python -m fgrpo_jax.sft --config configs/maze/small_sft.py --workdir runs/small_maze_sft

Two CPU cores that are busy with other work: four minutes. It ends at 43 % pass@1 and 96 % pass@256
on held-out mazes; configs/maze/small_rl.py goes on from it.
"""

from fgrpo_jax import config


def get_config():
    c = config.default()
    c.data.source = "maze:9x32768"
    c.data.max_prompt = 96
    c.rollout.max_response = 32
    c.sft.out = "runs/small_maze_start"
    c.sft.steps = 800
    c.sft.rows = 32
    c.sft.layers = 2
    c.sft.width = 96
    c.optim.lr = 2e-3
    c.optim.warmup = 50
    c.optim.b2 = 0.95
    c.checkpoint.every = 200
    return c
