"""KL to the start policy taken off the reward, k1, coefficient 1e-3, as in verl.

python -m fgrpo_jax.main --config CONFIG --method configs/methods/kl_reward.py
"""


def apply(c):
    c.kl.coef = 1e-3
    c.kl.place, c.kl.estimator = "reward", "k1"
