"""Dr. GRPO: no division by the standard deviation nor by the length (arXiv 2503.20783).

python -m fgrpo_jax.main --config CONFIG --method configs/methods/dr_grpo.py
"""


def apply(c):
    c.algo.advantage = "mean_only"
    c.algo.aggregator = "constant_length"
