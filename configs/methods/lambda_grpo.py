"""lambda-GRPO: rows weighted by length, with a learned exponent (arXiv 2510.06870).

python -m fgrpo_jax.main --config CONFIG --method configs/methods/lambda_grpo.py
"""


def apply(c):
    c.algo.aggregator = "lambda_grpo"
    c.algo.lambda_ratio = 1 / 9
    c.algo.lambda_lr = 0.1
