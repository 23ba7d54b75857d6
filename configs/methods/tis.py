"""TIS: the loss times the sampler-to-trainer ratio of each token, at most 2.

https://fengyao.notion.site/off-policy-rl; bounds and level as verl's `rollout_is`.

    python -m fgrpo_jax.main --config CONFIG --method configs/methods/tis.py
"""


def apply(c):
    c.importance.kind = "truncate"
    c.importance.high = 2.0
