"""The mean over sequences of their token sums: verl's `seq-mean-token-sum`, TRL's `luspo`.

python -m fgrpo_jax.main --config CONFIG --method configs/methods/sequence_sum.py
"""


def apply(c):
    c.algo.aggregator = "sequence_mean_token_sum"
