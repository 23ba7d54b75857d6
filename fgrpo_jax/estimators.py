"""From a step's rollouts to shaped rewards and advantages, by the config's names."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from fgrpo_jax import advantages, distributed, kl, shaping
from fgrpo_jax.config import Config
from fgrpo_jax.structs import Problem, Rollouts

COIN = 0x636F696E  # "coin": another stream than the shuffling's of the same seed


def shape_rewards(c: Config, rollouts: Rollouts) -> Rollouts:
    """The reward, or a coin's, lowered where likely, less the overlong penalty and the KL penalty.

    Raw correctness stays.
    """
    groups = rollouts.reward_PN.shape
    length_PN = rollouts.mask_BT.sum(axis=1).reshape(groups)
    reward_PN = rollouts.reward_PN
    if c.score.coin:
        reward_PN = np.where(heads(c, rollouts), c.score.right, c.score.wrong).astype(np.float32)
    if c.score.unlikeliness:
        reward_PN = shaping.unlikeliness_reward(
            reward_PN,
            rollouts.correct_PN,
            mean_logp(rollouts),
            rollouts.valid_PN,
            c.score.unlikeliness,
        )
    if c.score.overlong_buffer:
        reward_PN = reward_PN + shaping.overlong_penalty(
            length_PN, c.rollout.max_response, c.score.overlong_buffer, c.score.overlong_factor
        )
    if c.kl.coef and c.kl.place == "reward":
        assert rollouts.ref_logp_BT is not None
        kl_BT = kl.ESTIMATORS[c.kl.estimator](rollouts.sampler_logp_BT, rollouts.ref_logp_BT)
        kl_PN = np.where(rollouts.mask_BT, kl_BT, 0).sum(axis=1).reshape(groups)
        reward_PN = reward_PN - c.kl.coef * kl_PN
    return dataclasses.replace(rollouts, reward_PN=np.asarray(reward_PN, np.float32))


def heads(c: Config, rollouts: Rollouts) -> np.ndarray:
    """bool [P, N], true with the chance score.coin, by the seed and each prompt's position in the
    stream alone: the same after a resume, and on any number of hosts."""
    samples = rollouts.reward_PN.shape[1]
    draws = [  # RandomState's numbers no version of numpy may change
        np.random.RandomState([c.seed, int(position), COIN]).random_sample(samples)
        for position in rollouts.prompts.position_P
    ]
    return np.array(draws).reshape(-1, samples) < c.score.coin


def mean_logp(rollouts: Rollouts) -> np.ndarray:
    """[P, N], each sample's mean log-probability a token under the policy that sampled it."""
    length_B = np.maximum(rollouts.mask_BT.sum(axis=1), 1)
    sum_B = np.where(rollouts.mask_BT, rollouts.sampler_logp_BT, 0).sum(axis=1)
    return (sum_B / length_B).astype(np.float32).reshape(rollouts.reward_PN.shape)


def make_advantage(c: Config, problems: Sequence[Problem]) -> Callable[[Rollouts], jax.Array]:
    """advantage(rollouts) -> [P, N], before the focal weight.

    Args:
        problems: the training set, whose kinds are DISCO's domains.
    """
    kinds = Counter(problem.kind for problem in problems)

    def advantage(rollouts: Rollouts) -> jax.Array:
        reward_PN, valid_PN = rollouts.reward_PN, rollouts.valid_PN
        length_PN = rollouts.mask_BT.sum(axis=1).reshape(reward_PN.shape)
        eps = c.algo.std_eps
        match c.algo.advantage:
            case "grpo":
                return advantages.group_advantage(reward_PN, valid_PN, eps)
            case "mean_only":
                return advantages.mean_only_advantage(reward_PN, valid_PN)
            case "batch_std":
                whole = functools.partial(advantages.batch_std_advantage, eps=eps)
                return distributed.on_all_rows(whole, reward_PN, valid_PN)
            case "rloo":
                return advantages.rloo_advantage(reward_PN, valid_PN)
            case "leave_one_out":
                return advantages.leave_one_out_advantage(reward_PN, valid_PN, eps)
            case "opo":
                return advantages.opo_advantage(reward_PN, length_PN, valid_PN)
            case "reinforce_plus_plus_baseline":
                whole = advantages.reinforce_plus_plus_baseline_advantage
                return distributed.on_all_rows(whole, reward_PN, length_PN, valid_PN)
            case "maxrl":
                return advantages.maxrl_advantage(reward_PN, valid_PN, eps)
            case "pkpo":
                return advantages.pkpo_advantage(reward_PN, c.algo.pass_k, valid_PN)
            case "grpo_passk":
                return advantages.grpo_passk_advantage(reward_PN, valid_PN, eps)
            case "ngrpo":
                return advantages.ngrpo_advantage(reward_PN, valid_PN, c.score.right, eps)
            case "ds_grpo":
                return advantages.group_advantage(
                    reward_PN, valid_PN, eps, ddof=0
                ) + shaping.differential_smoothing(
                    rollouts.correct_PN,
                    mean_logp(rollouts),
                    valid_PN,
                    c.algo.smooth_right,
                    c.algo.smooth_wrong,
                )
            case "disco":
                counts = [kinds[problem.kind] for problem in rollouts.prompts.problems]
                share_P = jnp.array(counts, jnp.float32) / len(problems)
                weight_P = shaping.domain_weight(share_P, c.algo.domain_weight)
                weight_P *= shaping.difficulty_weight(reward_PN, valid_PN)
                return advantages.mean_only_advantage(reward_PN * weight_P[:, None], valid_PN)
        raise ValueError(f"no advantage {c.algo.advantage!r}")

    return advantage
