"""Leave-one-out mean and deviation: NeMo-RL's default for GRPO.

python -m fgrpo_jax.main --config CONFIG --method configs/methods/leave_one_out.py
"""


def apply(c):
    c.algo.advantage = "leave_one_out"
