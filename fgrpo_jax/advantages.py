"""Group-relative advantages and the focal weight: arrays in, arrays out.

P prompts, N samples each (a group). Each function is jitted with its settings (Python numbers)
static, and can be called inside jit, vmap, scan and shard_map; statistics of a batch are then of
the shard's. `valid_PN` leaves samples out of a group's statistics, as those whose judge failed:
their advantage is 0.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Num

from fgrpo_jax.numerics import at_least_float32, group_statistics, kernel

Valid = Bool[Array, "P N"] | None  # None: all


@kernel("eps", "ddof")
def group_advantage(
    reward_PN: Float[Array, "P N"], valid_PN: Valid = None, eps: float = 1e-6, ddof: int = 1
) -> Float[Array, "P N"]:
    """GRPO's advantage: each reward against the others of its group.

        A = (R - mean R) / (std R + eps)

    DeepSeekMath (arXiv 2402.03300); F-GRPO (arXiv 2602.06717), eq 3.

    Args:
        reward_PN: rewards of N samples of each of P prompts, any finite range.
        valid_PN: samples that count; None: all.
        eps: added to the standard deviation, in units of the reward; verl 1e-6, TRL 1e-4.
        ddof: 1 divides the squares by N - 1, as verl and TRL do; 0 by N.

    Returns:
        advantages, zero-mean in each group; exactly 0 in constant groups and in groups of one
        (where verl leaves the raw reward).

    >>> (2 * group_advantage(jnp.array([[1.0, 0.0, 0.0, 0.0]]))).round().tolist()
    [[3.0, -1.0, -1.0, -1.0]]
    """
    groups = group_statistics(reward_PN, valid_PN)
    return groups.centred / (groups.std(ddof) + eps)


@kernel()
def mean_only_advantage(
    reward_PN: Float[Array, "P N"], valid_PN: Valid = None
) -> Float[Array, "P N"]:
    """Dr. GRPO's: A = R - mean R, with no division (arXiv 2503.20783).

    >>> mean_only_advantage(jnp.array([[1.0, 0.0, 0.0, 0.0]])).tolist()
    [[0.75, -0.25, -0.25, -0.25]]
    """
    return group_statistics(reward_PN, valid_PN).centred


@kernel("eps")
def batch_std_advantage(
    reward_PN: Float[Array, "P N"], valid_PN: Valid = None, eps: float = 1e-4
) -> Float[Array, "P N"]:
    """A = (R - mean of the group) / (std of all rewards given + eps): Lite PPO (arXiv 2508.08221),
    TRL's `scale_rewards="batch"` with its eps.
    """
    groups = group_statistics(reward_PN, valid_PN)
    batch = group_statistics(groups.reward.reshape(1, -1), groups.valid.reshape(1, -1))
    return groups.centred / (batch.std() + eps)


@kernel()
def rloo_advantage(reward_PN: Float[Array, "P N"], valid_PN: Valid = None) -> Float[Array, "P N"]:
    """RLOO's: each reward against the mean of the others, A = N / (N - 1) (R - mean R).

    arXiv 2402.14740.

    >>> rloo_advantage(jnp.array([[3.0, 0.0, 0.0]])).tolist()
    [[3.0, -1.5, -1.5]]
    """
    groups = group_statistics(reward_PN, valid_PN)
    return groups.centred * groups.number / jnp.maximum(groups.number - 1, 1)


@kernel("eps")
def leave_one_out_advantage(
    reward_PN: Float[Array, "P N"], valid_PN: Valid = None, eps: float = 1e-6
) -> Float[Array, "P N"]:
    """RLOO divided by the standard deviation of the others: NeMo-RL's default for GRPO.

        A_i = (R_i - mean of the others) / (std of the others + eps)

    Left undivided where the others are all equal; with N = 2 they always are.
    """
    groups = group_statistics(reward_PN, valid_PN)
    others = ~jnp.eye(reward_PN.shape[1], dtype=bool)
    rest = group_statistics(
        jnp.broadcast_to(groups.centred[:, None], (*reward_PN.shape, reward_PN.shape[1])),
        groups.valid[:, None] & others[None],
    )
    advantage_PN1 = groups.centred[..., None] - rest.mean
    scaled_PN1 = jnp.where(rest.constant, advantage_PN1, advantage_PN1 / (rest.std() + eps))
    return jnp.where(groups.valid & ~groups.constant, scaled_PN1[..., 0], 0)


@kernel()
def opo_advantage(
    reward_PN: Float[Array, "P N"], length_PN: Num[Array, "P N"], valid_PN: Valid = None
) -> Float[Array, "P N"]:
    """OPO's: the baseline that least varies weighs rewards by response length (arXiv 2505.23585).

        A_i = R_i - sum(length R) / sum(length)

    >>> opo_advantage(jnp.array([[1.0, 0.0]]), jnp.array([[1.0, 3.0]])).tolist()
    [[0.75, -0.25]]
    """
    groups = group_statistics(reward_PN, valid_PN)
    weight_PN = jnp.where(groups.valid, length_PN, 0).astype(groups.reward.dtype)
    total_P1 = weight_PN.sum(axis=1, keepdims=True)
    weight_PN = weight_PN / jnp.where(total_P1 == 0, 1, total_P1)
    baseline_P1 = (weight_PN * groups.centred).sum(axis=1, keepdims=True)
    return jnp.where(groups.valid, groups.centred - baseline_P1, 0)


@kernel()
def reinforce_plus_plus_baseline_advantage(
    reward_PN: Float[Array, "P N"], length_PN: Num[Array, "P N"], valid_PN: Valid = None
) -> Float[Array, "P N"]:
    """REINFORCE++ with a group baseline: centred by group, whitened over the batch's tokens.

        A = (R - mean R - m) / std,  m and std over all tokens

    arXiv 2501.03262, verl's `reinforce_plus_plus_baseline`; length_PN counts response tokens.
    """
    groups = group_statistics(reward_PN, valid_PN)
    tokens_PN = jnp.where(groups.valid, length_PN, 0).astype(groups.reward.dtype)
    return _whiten(groups.centred, tokens_PN)


@kernel("discount")
def reinforce_plus_plus_advantage(
    token_reward_BT: Float[Array, "B T"], mask_BT: Bool[Array, "B T"], discount: float = 1.0
) -> Float[Array, "B T"]:
    """REINFORCE++: each token's return, whitened over the batch's tokens (arXiv 2501.03262).

        G_t = r_t + discount G_(t+1),  A = (G - mean G) / std G

    Not group-relative: for rewards by token, as a KL penalty gives.
    """
    reward_BT = jnp.where(mask_BT, at_least_float32(token_reward_BT), 0)

    def back(later_B, reward_B):
        return (now_B := reward_B + discount * later_B), now_B

    _, return_TB = jax.lax.scan(back, jnp.zeros_like(reward_BT[:, 0]), reward_BT.T, reverse=True)
    return _whiten(return_TB.T, mask_BT.astype(reward_BT.dtype))


def _whiten(value: Array, weight: Array) -> Array:
    """Mean 0 and variance 1 over `weight` tokens each; 0 without weight, and if all are equal."""
    constant = group_statistics(value.reshape(1, -1), weight.reshape(1, -1) > 0).constant
    tokens = weight.sum()
    mean = (weight * value).sum() / (tokens + 1e-8)
    variance = (weight * (value - mean) ** 2).sum() / (tokens + 1e-8)  # each 1e-8 is verl's
    variance = variance * tokens / jnp.maximum(tokens - 1, 1)
    white = (value - mean) * jax.lax.rsqrt(variance + 1e-8)
    return jnp.where((weight > 0) & ~constant, white, 0)


@kernel("eps")
def maxrl_advantage(
    reward_PN: Float[Array, "P N"], valid_PN: Valid = None, eps: float = 1e-6
) -> Float[Array, "P N"]:
    """MaxRL's: A = (R - mean R) / (mean R + eps) (arXiv 2602.02710), for rewards 0 and 1.

    Rewards must not be negative: a negative mean would turn the signs.
    """
    groups = group_statistics(reward_PN, valid_PN)
    return groups.centred / jnp.where(groups.constant, 1, groups.mean + eps)


@kernel("k")
def pkpo_advantage(
    reward_PN: Float[Array, "P N"], k: int, valid_PN: Valid = None
) -> Float[Array, "P N"]:
    """PKPO's: what a sample adds to the best of k (arXiv 2505.15201), less that of the others.

        w_i = E[max(R_i, M) - M],  M the best of k - 1 others;  A_i = n (w_i - mean w) / (n - 1)

    For rewards 0 and 1 with c right, w is C(n - c, k - 1) / C(n - 1, k - 1) at a right sample
    and 0 at a wrong one. k = 1 is RLOO. Groups with fewer than k valid samples give 0.

    Raises:
        ValueError: k is not in 1 ... N.

    >>> (9 * pkpo_advantage(jnp.array([[1.0, 1.0, 0.0, 0.0]]), 2)).round().tolist()
    [[4.0, 4.0, -4.0, -4.0]]
    """
    samples = reward_PN.shape[1]
    if not 1 <= k <= samples:
        raise ValueError(f"k is {k}: it must be in 1 ... {samples}, the samples of a group")
    if k == 1:
        return rloo_advantage(reward_PN, valid_PN)
    groups = group_statistics(reward_PN, valid_PN)
    # chance[n, j] = C(j, k - 2) / C(n - 1, k - 1): of n samples sorted upwards, the best of k - 1
    # others is the j-th (j < i); from the top down, where neither number overflows
    chance = np.zeros((samples + 1, samples))
    for n in range(k, samples + 1):
        share = (k - 1) / (n - 1)
        for j in range(n - 2, k - 3, -1):
            chance[n, j] = share
            share *= (j - k + 2) / max(j, 1)
    chance_PN = jnp.asarray(chance, groups.reward.dtype)[groups.valid.sum(axis=1)]
    order_PN = jnp.argsort(jnp.where(groups.valid, groups.reward, jnp.inf), axis=1)
    sorted_PN = jnp.take_along_axis(groups.centred, order_PN, axis=1)
    before = lambda x_PN: jnp.cumsum(x_PN, axis=1) - x_PN
    gain_PN = sorted_PN * before(chance_PN) - before(chance_PN * sorted_PN)
    gain_PN = jnp.take_along_axis(gain_PN, jnp.argsort(order_PN, axis=1), axis=1)
    return rloo_advantage(gain_PN, groups.valid)


@kernel("eps")
def grpo_passk_advantage(
    reward_PN: Float[Array, "P N"], valid_PN: Valid = None, eps: float = 1e-6
) -> Float[Array, "P N"]:
    """verl's `grpo_passk`: only the best sample learns, by its lead over the second.

        A_best = (R_best - R_second) / (std R + eps)

    arXiv 2503.19595; 0 everywhere where two share the best reward.
    """
    groups = group_statistics(reward_PN, valid_PN)
    if reward_PN.shape[1] == 1:
        return groups.centred
    ranked_PN = jnp.where(groups.valid, groups.centred, -jnp.inf)
    top_P2, _ = jax.lax.top_k(ranked_PN, 2)
    lead_P1 = jnp.where(groups.number < 2, 0, top_P2[:, :1] - top_P2[:, 1:])
    best_PN = ranked_PN == top_P2[:, :1]
    return jnp.where(best_PN, lead_P1 / (groups.std() + eps), 0)


@kernel("best", "eps")
def ngrpo_advantage(
    reward_PN: Float[Array, "P N"], valid_PN: Valid = None, best: float = 1.0, eps: float = 1e-6
) -> Float[Array, "P N"]:
    """NGRPO's: GRPO with one virtual sample of the best reward in each group's statistics.

    arXiv 2509.18851. Groups that are all wrong get negative advantages instead of none.

    >>> (2 * ngrpo_advantage(jnp.zeros((1, 3)))).round().tolist()
    [[-1.0, -1.0, -1.0]]
    """
    groups = group_statistics(reward_PN, valid_PN)
    virtual_PN = jnp.pad(groups.reward, ((0, 0), (0, 1)), constant_values=best)
    there_PN = jnp.pad(groups.valid, ((0, 0), (0, 1)), constant_values=True)
    return group_advantage(virtual_PN, there_PN, eps=eps)[:, :-1]


@kernel("wrong", "right")
def success_rate(
    correct_PN: Float[Array, "P N"], valid_PN: Valid = None, wrong: float = 0.0, right: float = 1.0
) -> Float[Array, " P"]:
    """The empirical success rate of each group, unsmoothed.

        mu = (mean R - wrong) / (right - wrong) = X / n,  X samples right of n

    F-GRPO (arXiv 2602.06717), eqs 1 and 11. The paper treats rewards of two values; for graded
    ones in [wrong, right] this is their normalised mean.

    Args:
        correct_PN: raw correctness, not a shaped reward.
        wrong, right: its two values, wrong < right; what lies beyond counts as the nearer one.
    """
    return 1 - _failure_rate(correct_PN, valid_PN, wrong, right)


@kernel("gamma", "wrong", "right")
def focal_weight(
    correct_PN: Float[Array, "P N"],
    gamma: float,
    valid_PN: Valid = None,
    wrong: float = 0.0,
    right: float = 1.0,
) -> Float[Array, " P"]:
    """F-GRPO's weight, which turns learning from what the policy already knows.

        g = (1 - mu) ** gamma,  mu the success rate

    F-GRPO (arXiv 2602.06717), eq 12. It multiplies a group's advantages, whichever they are
    (eq 13), is not renormalised over the batch, and passes no gradient. Arguments as success_rate.

    Args:
        gamma: at least 0; 0 gives 1 everywhere (plain GRPO), the paper uses 0.5 to 1.

    Returns:
        weights in [0, 1]: 1 where none is right, 0 where all are (and gamma > 0).

    >>> focal_weight(jnp.array([[1.0, 0.0, 0.0, 0.0]]), 2.0).tolist()
    [0.5625]
    """
    if gamma < 0:
        raise ValueError(f"gamma is {gamma}: it must be at least 0")
    return jax.lax.stop_gradient(_failure_rate(correct_PN, valid_PN, wrong, right)) ** gamma


def _failure_rate(correct_PN: Array, valid_PN: Array | None, wrong: float, right: float) -> Array:
    """1 - mu: counted, and exact at both ends. Compiled, 1 - mean may come out below 0, and
    N * (1 / N) below 1, since XLA divides by a constant through its reciprocal."""
    if not wrong < right:
        raise ValueError(f"wrong is {wrong} and right is {right}: wrong must be below right")
    correct_PN = at_least_float32(correct_PN)
    valid_PN = jnp.ones(correct_PN.shape, bool) if valid_PN is None else valid_PN
    # "Equal" allows for the rounding of rewards that were computed, as wrong + score * range.
    near = 4 * jnp.finfo(correct_PN.dtype).eps * max(abs(wrong), abs(right))
    graded_PN = (right - correct_PN) / (right - wrong)
    graded_PN = jnp.where(correct_PN >= right - near, 0, graded_PN)
    failed_PN = jnp.where(correct_PN <= wrong + near, 1, graded_PN)
    failures_P = jnp.where(valid_PN, failed_PN, 0).sum(axis=1)
    samples_P = valid_PN.sum(axis=1).astype(failures_P.dtype)
    return jnp.where(failures_P == samples_P, 1, failures_P / jnp.maximum(samples_P, 1))
