"""GRPO as first published: the mean over sequences of their token means (arXiv 2402.03300).

python -m fgrpo_jax.main --config CONFIG --method configs/methods/sequence_mean.py
"""


def apply(c):
    c.algo.aggregator = "sequence_mean_token_mean"
