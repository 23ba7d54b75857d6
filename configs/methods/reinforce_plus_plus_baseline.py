"""REINFORCE++ with a group baseline, whitened over tokens (arXiv 2501.03262).

python -m fgrpo_jax.main --config CONFIG --method configs/methods/reinforce_plus_plus_baseline.py
"""


def apply(c):
    c.algo.advantage = "reinforce_plus_plus_baseline"
