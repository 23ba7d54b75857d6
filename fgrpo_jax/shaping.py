"""What is shaped around the advantage: rewards, a term of the advantage, the choice of samples.

It moves rewards, never the raw correctness that the focal weight is made of.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from fgrpo_jax.numerics import at_least_float32, group_statistics, kernel

Valid = Bool[Array, "P N"] | None  # None: all


@kernel("max_response", "buffer", "factor")
def overlong_penalty(
    length: Num[Array, "..."], max_response: int, buffer: int, factor: float = 1.0
) -> Float[Array, "..."]:
    """DAPO's soft punishment, added to the reward: 0 down to -factor over the last tokens.

        -clip((length - (max_response - buffer)) / buffer, 0, 1) * factor

    DAPO (arXiv 2503.14476), eq 13; verl's `overlong_buffer`.

    Args:
        length: of the response, in tokens.
        max_response, buffer: in tokens; buffer 0 gives 0.

    >>> overlong_penalty(jnp.array([80, 90, 100]), 100, 20).tolist()
    [-0.0, -0.5, -1.0]
    """
    over = at_least_float32(length) - (max_response - buffer)
    return -factor * jnp.clip(over / buffer, 0, 1) if buffer else jnp.zeros_like(over)


@kernel("penalty")
def unlikeliness_reward(
    reward_PN: Float[Array, "P N"],
    correct_PN: Float[Array, "P N"],
    logp_PN: Float[Array, "P N"],
    valid_PN: Valid = None,
    penalty: float = 0.25,
) -> Float[Array, "P N"]:
    """The reward of right samples, less the likelier they were in their group.

        R (1 - penalty (n - rank) / n),  rank 1 the likeliest of n

    "Rewarding the Unlikely" (arXiv 2506.02355). The reward of a right sample must be above 0.

    Args:
        logp_PN: mean log-probability a token under the policy that sampled.

    >>> unlikeliness_reward(jnp.ones((1, 2)), jnp.ones((1, 2)), jnp.array([[-1.0, -2.0]])).tolist()
    [[0.875, 1.0]]
    """
    groups = group_statistics(reward_PN, valid_PN)
    logp_PN = jnp.where(groups.valid, at_least_float32(logp_PN), jnp.inf)  # last, outside 0 ... n-1
    rank_PN = jnp.argsort(jnp.argsort(logp_PN, axis=1), axis=1).astype(groups.reward.dtype)
    share_PN = rank_PN / jnp.maximum(groups.number, 1)
    lowered_PN = groups.reward * (1 - penalty * share_PN)
    return jnp.where((correct_PN > 0) & groups.valid, lowered_PN, groups.reward)


@kernel("right", "wrong")
def differential_smoothing(
    correct_PN: Float[Array, "P N"],
    logp_PN: Float[Array, "P N"],
    valid_PN: Valid = None,
    right: float = 0.05,
    wrong: float = 0.05,
) -> Float[Array, "P N"]:
    """DS-GRPO's term, added to a group advantage of ddof 0 (arXiv 2511.19942).

        -right logp where correct, +wrong logp where not

    Args:
        correct_PN: raw correctness, 1 right and 0 wrong.
        logp_PN: mean log-probability a token under the policy that sampled, in nats.
        right, wrong: coefficients; 0.05 each in MaxRL's code.
    """
    logp_PN, correct_PN = at_least_float32(logp_PN), at_least_float32(correct_PN)
    term_PN = logp_PN * (wrong - (right + wrong) * correct_PN)
    return term_PN if valid_PN is None else jnp.where(valid_PN, term_PN, 0)


@kernel("form")
def domain_weight(share_P: Float[Array, " P"], form: str = "log") -> Float[Array, " P"]:
    """DISCO's weight of a prompt whose domain has this share of the data (arXiv 2505.15074).

        log: log(1 + 1 / p),  log_squared: its square,  inverse: 1 / p

    Args:
        share_P: in (0, 1].

    >>> domain_weight(jnp.array([0.25]), "inverse").tolist()
    [4.0]
    """
    share_P = at_least_float32(share_P)
    if form == "inverse":
        return 1 / share_P
    weight_P = jnp.log1p(1 / share_P)
    if form not in ("log", "log_squared"):
        raise ValueError(f"form is {form!r}: it must be log, log_squared or inverse")
    return weight_P if form == "log" else weight_P**2


@kernel("eps")
def difficulty_weight(
    reward_PN: Float[Array, "P N"], valid_PN: Valid = None, eps: float = 1e-5
) -> Float[Array, " P"]:
    """DISCO's 1 / (mean R + eps) of each group, for rewards 0 and 1 (arXiv 2505.15074).

    Both weights multiply the reward, whose advantage is then mean_only_advantage. With a domain
    weight of 1 that is MaxRL.
    """
    groups = group_statistics(reward_PN, valid_PN)
    return 1 / (groups.mean[:, 0] + eps)


@kernel("size")
def max_variance_subset(
    reward_PN: Float[Array, "P N"], size: int, valid_PN: Valid = None
) -> Int[Array, "P M"]:
    """PODS: the M samples of each group whose rewards vary most (arXiv 2504.13818).

    They are k of the highest and M - k of the lowest, with the k of greatest variance. Advantages
    are made of the subset, the focal weight of all N.

    Args:
        size: M, in 1 ... N.

    Returns:
        columns of the subset, lowest reward first; invalid samples last, and only where a group
        has fewer than M others.

    >>> max_variance_subset(jnp.array([[0.0, 1.0, 0.0, 0.0, 1.0]]), 4).tolist()
    [[0, 2, 1, 4]]
    """
    samples = reward_PN.shape[1]
    if not 1 <= size <= samples:
        raise ValueError(f"size is {size}: it must be in 1 ... {samples}, the samples of a group")
    groups = group_statistics(reward_PN, valid_PN)
    order_PN = jnp.argsort(jnp.where(groups.valid, groups.reward, jnp.inf), axis=1)
    sorted_PN = jnp.take_along_axis(groups.centred, order_PN, axis=1)
    place_1M, top_K1 = jnp.arange(size)[None], jnp.arange(size + 1)[:, None]
    last_P11 = jnp.maximum(groups.valid.sum(axis=1), size)[:, None, None]
    # for each number k of the highest: the first M - k places and the last k
    last_P1M = last_P11 - size + place_1M[None]
    place_PKM = jnp.where((place_1M < size - top_K1)[None], place_1M[None], last_P1M)
    variance_PK = jnp.take_along_axis(sorted_PN[:, None], place_PKM, axis=2).var(axis=2)
    best_P11 = variance_PK.argmax(axis=1)[:, None, None]
    place_PM = jnp.take_along_axis(place_PKM, best_P11, axis=1)[:, 0]
    return jnp.take_along_axis(order_PN, place_PM, axis=1)
