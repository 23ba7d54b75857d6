"""KL to the start policy in the loss, k3: the paper's GRPO-KL control, coefficient 1e-3.

python -m fgrpo_jax.main --config CONFIG --method configs/methods/kl_loss.py
"""


def apply(c):
    c.kl.coef = 1e-3
    c.kl.place, c.kl.estimator = "loss", "k3"
