"""Pass@k training by the best sample's lead alone: verl's `grpo_passk` (arXiv 2503.19595).

python -m fgrpo_jax.main --config CONFIG --method configs/methods/grpo_passk.py
"""


def apply(c):
    c.algo.advantage = "grpo_passk"
