"""The warm start of the paper's mazes: a new model of 3,944,704 parameters on worked paths.

    python -m fgrpo_jax.sft --config configs/maze/sft.py --workdir runs/maze_sft

For a GPU. 1,500 updates of 32 mazes of 17 x 17, 48,000 in all. configs/maze/rl.py goes on from it.
"""

from fgrpo_jax import config


def get_config():
    c = config.default()
    c.data.source = "maze:17"
    c.data.max_prompt = 320
    c.rollout.max_response = 180
    c.sft.out = "runs/maze_start"
    c.sft.steps = 1500
    c.sft.rows = 32
    c.sft.layers = 4
    c.sft.width = 256
    c.sft.heads = 4
    c.sft.kv_heads = 2
    c.sft.feed_forward = 1024
    c.sft.rope_theta = 1e6
    c.optim.lr = 5e-4
    c.optim.warmup = 1
    c.optim.b2 = 0.95
    c.checkpoint.every = 500
    return c
