"""The paper's closed forms (arXiv 2602.06717, sections 2 and 3, appendices B, H and N).

One prompt, n samples: `mu` is the probability of a right one, `tau` that of one in a rare set of
right ones, 0 <= tau <= mu <= 1. Numbers and arrays broadcast as jax's do; results are float32, or
float64 where jax has it enabled. For each action of a softmax (V of them), `p_V` is its
probability, `right_V` whether it is right, and `sampled_V` whether it was sampled at least once.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy.special import gammaln
from jaxtyping import Array, Bool, Float, Int

Numbers = Any  # a number, or an array of them


def tail_miss_probability(mu: Numbers, tau: Numbers, n: Numbers) -> Array:
    """The probability that a group can teach, and holds none of the rare set: Lemma 3.1.

        Pr = (1 - tau)^n - (mu - tau)^n - (1 - mu)^n

    as a^n (1 - r^n - s^n) with a = 1 - tau, r = (mu - tau) / a and s = (1 - mu) / a = 1 - r, so
    that nothing cancels.

    Args:
        n: samples, 1 or more.

    >>> round(float(tail_miss_probability(0.3, 0.015, 8)), 5)
    0.82842
    """
    mu, tau, n = _floats(mu, tau, n)
    rest = 1 - tau
    less = jnp.minimum(mu - tau, 1 - mu) / jnp.where(rest > 0, rest, 1)
    mixed = -jnp.expm1(n * jnp.log1p(-less)) - less**n
    return jnp.where(n > 1, jnp.exp(n * jnp.log1p(-tau)) * mixed, 0)


def active_probability(mu: Numbers, n: Numbers) -> Array:
    """The probability that a group can teach, having right and wrong samples: 1 - mu^n - (1-mu)^n.

    >>> float(active_probability(0.5, 2))
    0.5
    """
    return tail_miss_probability(mu, 0, n)


def peak_group_size(mu: Numbers, tau: Numbers) -> Int[Array, "..."]:
    """The n of 1 to 2^24 at which the rare set is missed most often; of equals the first.

    From n to n + 1 the probability grows by a^n ((1 - mu + tau) r^n + mu s^n - tau), with a, r and
    s as above. The bracket falls in n, so there is one peak: its last sign change, found bit by
    bit.

    Args:
        tau: above 0 and below mu, which is below 1.

    >>> int(peak_group_size(0.5, 0.05))
    5
    """
    mu, tau = _floats(mu, tau)
    rest = 1 - tau
    log_r, log_s = jnp.log((mu - tau) / rest), jnp.log((1 - mu) / rest)
    last = jnp.zeros(jnp.broadcast_shapes(mu.shape, tau.shape), mu.dtype)  # at which it still grows
    for bit in range(23, -1, -1):
        n = last + 2.0**bit
        growth = (1 - mu + tau) * jnp.exp(n * log_r) + mu * jnp.exp(n * log_s) - tau
        last = jnp.where(growth > 0, n, last)
    return last.astype(jnp.int32) + 1


def peak_group_size_estimate(mu: Numbers, tau: Numbers) -> Array:
    """About the same, of the likelier of the two ways to be inactive alone; not rounded.

        q = max(mu - tau, 1 - mu), a = 1 - tau:  n = ln(m ln q / ln a) / ln(a / q)

    with m = 2 where the two are within a tenth of each other, else 1. Within 1 of the peak where
    one of them is far likelier than the other.
    """
    mu, tau = _floats(mu, tau)
    one, other = mu - tau, 1 - mu
    q, a = jnp.maximum(one, other), 1 - tau
    times = jnp.where(jnp.minimum(one, other) > 0.9 * q, 2.0, 1.0)
    return jnp.log(times * jnp.log(q) / jnp.log1p(-tau)) / jnp.log(a / q)


def logit_change(
    p_V: Float[Array, " V"],
    right_V: Bool[Array, " V"],
    sampled_V: Bool[Array, " V"],
    step: Numbers,
    reward_right: float = 1.0,
    reward_wrong: float = -1.0,
) -> Float[Array, " V"]:
    """What one step of gradient ascent adds to the logits: eq 5.

        dz_i = step p_i (R_i - S),  R_i = 0 where i was not sampled,  S = sum_i R_i p_i

    Args:
        step: learning rate / samples, above 0.
    """
    reward_V = jnp.where(sampled_V, jnp.where(right_V, reward_right, reward_wrong), 0.0)
    reward_V = reward_V.astype(p_V.dtype)
    return step * p_V * (reward_V - reward_V @ p_V)


def mass_change(
    p_V: Float[Array, " V"], change_V: Float[Array, " V"], set_V: Bool[Array, " V"]
) -> Float[Array, ""]:
    """What a set of actions gains in probability by a small change of the logits: eq 19.

    dQ = sum_{i in set} p_i dz_i - Q sum_j p_j dz_j
    """
    gain_V = p_V * change_V
    return _sum(gain_V, set_V) - _sum(p_V, set_V) * gain_V.sum()


def correct_mass_change(
    p_V: Float[Array, " V"],
    right_V: Bool[Array, " V"],
    sampled_V: Bool[Array, " V"],
    step: Numbers,
    reward_right: float = 1.0,
    reward_wrong: float = -1.0,
) -> Float[Array, ""]:
    """What the right actions together gain by `logit_change`: eq 17.

        dQ = step ((R_c - S) Q_neg A2 + (S - R_w) Q_pos B2 + S (Q_pos U_neg2 - Q_neg U_pos2))

    with A2, B2, U_pos2, U_neg2 the sums of p^2 over right and wrong actions, sampled and not. The
    first two terms are never negative; the third may be.
    """
    pos, neg = _sum(p_V, right_V), _sum(p_V, ~right_V)
    right2, wrong2, unseen_right2, unseen_wrong2 = _second_moments(p_V, right_V, sampled_V)
    base = _baseline(p_V, right_V, sampled_V, reward_right, reward_wrong)
    sampled = (reward_right - base) * neg * right2 + (base - reward_wrong) * pos * wrong2
    return step * (sampled + base * (pos * unseen_wrong2 - neg * unseen_right2))


def unsampled_correct_mass_change(
    p_V: Float[Array, " V"],
    right_V: Bool[Array, " V"],
    sampled_V: Bool[Array, " V"],
    step: Numbers,
    reward_right: float = 1.0,
    reward_wrong: float = -1.0,
) -> Float[Array, ""]:
    """What the right actions that were not sampled gain by `logit_change`: Proposition 3.2.

        dQ_u = step (-S U_pos2 - Q_u ((R_c - S) A2 + (R_w - S) B2 - S U2))

    drift and coupling by normalisation, both of which may be negative while all right actions
    together gain.
    """
    right2, wrong2, unseen_right2, unseen_wrong2 = _second_moments(p_V, right_V, sampled_V)
    base = _baseline(p_V, right_V, sampled_V, reward_right, reward_wrong)
    coupling = (reward_right - base) * right2 + (reward_wrong - base) * wrong2
    coupling -= base * (unseen_right2 + unseen_wrong2)
    return step * (-base * unseen_right2 - _sum(p_V, right_V & ~sampled_V) * coupling)


def sampled_mass(
    p_V: Float[Array, " V"], right_V: Bool[Array, " V"], k: Numbers, n: Numbers
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """(E[P_pos | X = k], E[P_neg | X = k]): the expected probability of the right and of the wrong
    actions that were sampled, where k of n samples were right: Lemma H.1.

        E[P_pos | X = k] = sum_{right} p (1 - (1 - p / mu)^k)

    which does not fall in k, as the other does not rise.

    Args:
        k: 0 to n.
    """
    k, n = jnp.asarray(k, p_V.dtype), jnp.asarray(n, p_V.dtype)

    def expected(set_V: Array, draws: Array) -> Array:
        share_V = p_V / jnp.maximum(_sum(p_V, set_V), jnp.finfo(p_V.dtype).tiny)
        hit_V = -jnp.expm1(draws * jnp.log1p(-jnp.minimum(share_V, 1)))
        return jnp.where(draws > 0, _sum(p_V * hit_V, set_V), 0)

    return expected(right_V, k), expected(~right_V, n - k)


def low_learning_rate_multiplier(gamma: Numbers) -> Array:
    """By how much the focal weight lowers the mean advantage, over success rates alike: appendix N.

        m = B(3/2, gamma + 3/2) / B(3/2, 3/2) = 4 / sqrt(pi) Gamma(gamma + 3/2) / Gamma(gamma + 3)

    from |A| ~ sqrt(mu (1 - mu)); the learning rate of a control without the weight.

    >>> [round(float(low_learning_rate_multiplier(gamma)), 4) for gamma in (0, 0.5, 1)]
    [1.0, 0.6791, 0.5]
    """
    (gamma,) = _floats(gamma)
    return 4 / jnp.sqrt(jnp.pi) * jnp.exp(gammaln(gamma + 1.5) - gammaln(gamma + 3))


def _floats(*values: Numbers) -> list[jax.Array]:
    return [jnp.asarray(value, jnp.result_type(float)) for value in values]


def _sum(x_V: Array, set_V: Array) -> Array:
    return jnp.where(set_V, x_V, 0).sum()


def _second_moments(p_V: Array, right_V: Array, sampled_V: Array) -> tuple[Array, ...]:
    """Sums of p^2: sampled right, sampled wrong, unsampled right, unsampled wrong."""
    sets = sampled_V & right_V, sampled_V & ~right_V, ~sampled_V & right_V, ~sampled_V & ~right_V
    return tuple(_sum(p_V * p_V, set_V) for set_V in sets)


def _baseline(
    p_V: Array, right_V: Array, sampled_V: Array, reward_right: float, reward_wrong: float
) -> Array:
    """S, the reward of the sampled actions, each counted by its probability."""
    right, wrong = _sum(p_V, sampled_V & right_V), _sum(p_V, sampled_V & ~right_V)
    return reward_right * right + reward_wrong * wrong
