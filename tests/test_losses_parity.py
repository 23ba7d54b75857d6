"""Values and gradients of verl's and TRL's own code, by public arguments alone."""

import json
import os
import pathlib
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import DATA

from fgrpo_jax import advantages, aggregators, kl, losses

PATH = pathlib.Path(os.environ.get("FGRPO_LOSS_PARITY", DATA / "loss_parity.json"))
FILE = json.loads(PATH.read_text())
CASES = FILE["cases"]
PRECISION = pytest.mark.parametrize("dtype, tolerance", [("float64", 1e-9), ("float32", 1e-5)])

AGGREGATORS = {
    "verl": {
        "token-mean": aggregators.token_mean,
        "seq-mean-token-mean": aggregators.sequence_mean_token_mean,
        "seq-mean-token-sum": aggregators.sequence_mean_token_sum,
        "seq-mean-token-sum-norm": lambda loss, mask: aggregators.constant_length(
            loss, mask, length=mask.shape[1]
        ),
    },
    "trl": {
        "dapo": aggregators.token_mean,
        "cispo": aggregators.token_mean,
        "bnpo": aggregators.token_mean,
        "grpo": lambda loss, mask: aggregators.sequence_mean_token_mean(
            loss, mask, count_empty=True, eps=0.0
        ),
        "luspo": lambda loss, mask: aggregators.sequence_mean_token_sum(
            loss, mask, count_empty=True
        ),
        "dr_grpo": lambda loss, mask: aggregators.constant_length(
            loss, mask, length=FILE["inputs"]["max_completion_length"], count_empty=True
        ),
    },
}
AGGREGATORS["trl"]["sapo"] = AGGREGATORS["trl"]["grpo"]


class Inputs:
    """The fixture's arrays in one precision."""

    def __init__(self, dtype):
        arrays = FILE["inputs"]
        self.logp, self.old_logp, self.ref_logp = (
            jnp.array(arrays[name], dtype) for name in ("logp", "old_logp", "ref_logp")
        )
        self.mask = jnp.array(arrays["mask"], bool)
        self.rewards = jnp.array(arrays["rewards"], dtype).reshape(-1, arrays["group_size"])
        self.lengths = self.mask.sum(axis=1).reshape(self.rewards.shape)
        self.token_rewards = jnp.zeros_like(self.logp).at[:, 0].set(self.rewards.reshape(-1))
        self.verl_advantage = jnp.array(FILE["verl_advantages"], dtype)
        self.trl_advantage = jnp.array(FILE["trl_advantages"], dtype)[:, None]


def verl_loss(x, case, logp):
    """verl's policy losses by case name -> (loss by token, aggregator)."""
    p, args = case["params"], (logp, x.old_logp, x.verl_advantage)
    clips = {"clip_low": p["clip_low"], "clip_high": p["clip_high"]}
    loss = {
        "vanilla": lambda: losses.ppo_clip(*args, **clips, dual_clip=p["clip_c"]),
        "cispo": lambda: losses.cispo(*args, **clips),
        "gspo": lambda: losses.gspo_token(*args, x.mask, **clips),
        "geo_mean": lambda: losses.gmpo(*args, x.mask, **clips),
        "sapo": lambda: losses.sapo(*args),
        "gpg": lambda: losses.policy_gradient(logp, x.verl_advantage),
    }[case["name"].removeprefix("loss/")]()
    if p["is_weights"]:
        loss *= jnp.array(p["is_weights"], logp.dtype)
    if case["name"] == "loss/geo_mean":  # a plain mean over the rows, whatever the mode says
        return loss, AGGREGATORS["trl"]["grpo"]
    return loss, AGGREGATORS["verl"][p["loss_agg_mode"]]


def trl_loss(x, case, logp):
    """TRL's loss types -> (loss by token, aggregator)."""
    p, args = case["params"], (logp, x.old_logp, x.trl_advantage)
    name = case["name"].removeprefix("loss/")
    high = p["epsilon"] if p["epsilon_high"] is None else p["epsilon_high"]
    clips = {"clip_low": p["epsilon"], "clip_high": high}
    if name == "cispo":
        loss = losses.cispo(*args, clip_low=1.0, clip_high=high - 1)
    elif name == "sapo":
        loss = losses.sapo(*args)
    elif p["importance_sampling_level"] == "sequence":
        loss = losses.gspo(*args, x.mask, **clips)
    else:
        loss = losses.ppo_clip(*args, **clips, dual_clip=p["delta"] or 0.0)
    if p["is_ratio"]:
        loss *= jnp.array(p["is_ratio"], logp.dtype)
    if p["beta"]:
        penalty = kl.k3(logp, x.ref_logp, highest=float("inf"))
        if p["use_bias_correction_kl"]:
            penalty *= losses.importance_ratio(logp, x.old_logp)
        loss += p["beta"] * penalty
    return loss, AGGREGATORS["trl"][name]


ADVANTAGES = {
    ("verl", "grpo"): lambda x: advantages.group_advantage(x.rewards),
    ("verl", "grpo_nostd"): lambda x: advantages.mean_only_advantage(x.rewards),
    ("verl", "rloo"): lambda x: advantages.rloo_advantage(x.rewards),
    ("verl", "opo"): lambda x: advantages.opo_advantage(x.rewards, x.lengths),
    ("verl", "grpo_passk"): lambda x: advantages.grpo_passk_advantage(x.rewards),
    ("verl", "reinforce_plus_plus_baseline"): lambda x: (
        advantages.reinforce_plus_plus_baseline_advantage(x.rewards, x.lengths)
    ),
    ("verl", "reinforce_plus_plus"): lambda x: advantages.reinforce_plus_plus_advantage(
        x.token_rewards, x.mask
    ),
    ("trl", "group"): lambda x: advantages.group_advantage(x.rewards, eps=1e-4),
    ("trl", "none"): lambda x: advantages.mean_only_advantage(x.rewards),
    ("trl", "batch"): lambda x: advantages.batch_std_advantage(x.rewards),
}


def kind(case):
    return case["name"].split("/")[0]


def label(case):
    return f"{case['peer']}-{case['name']}"


def of_kind(name):
    return [pytest.param(case, id=label(case)) for case in CASES if kind(case) == name]


def test_every_case_is_covered():
    assert len(CASES) >= 51 and {kind(case) for case in CASES} == {"adv", "loss", "kl"}
    assert Counter(case["peer"] for case in CASES).keys() == {"verl", "trl"}


@PRECISION
@pytest.mark.parametrize("case", of_kind("adv"))
def test_advantage(case, dtype, tolerance):
    with jax.enable_x64(dtype == "float64"):
        x = Inputs(dtype)
        out = ADVANTAGES[case["peer"], case["name"].removeprefix("adv/")](x)
        assert out.dtype == dtype
        if out.shape == x.rewards.shape and case["peer"] == "verl":  # it lays them over the tokens
            out = out.reshape(-1, 1) * x.mask.astype(dtype)
        expected = np.array(case["value"])
        np.testing.assert_allclose(
            out.reshape(expected.shape), expected, rtol=tolerance, atol=tolerance
        )


@PRECISION
@pytest.mark.parametrize("case", of_kind("loss"))
def test_loss_and_gradient(case, dtype, tolerance):
    with jax.enable_x64(dtype == "float64"):
        x = Inputs(dtype)
        peer = {"verl": verl_loss, "trl": trl_loss}[case["peer"]]

        def loss(logp):
            loss_BT, aggregate = peer(x, case, logp)
            total, count = aggregate(loss_BT, x.mask)
            return total / count

        value, grad = jax.value_and_grad(loss)(x.logp)
        assert value.dtype == grad.dtype == dtype
        np.testing.assert_allclose(value, case["value"], rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(grad, case["grad"], rtol=tolerance, atol=tolerance)


@PRECISION
@pytest.mark.parametrize("case", of_kind("kl"))
def test_kl_and_gradient(case, dtype, tolerance):
    with jax.enable_x64(dtype == "float64"):
        x = Inputs(dtype)
        estimate = kl.ESTIMATORS[case["name"].removeprefix("kl/")]
        value = estimate(x.logp, x.ref_logp)
        np.testing.assert_allclose(value, case["value"], rtol=tolerance, atol=tolerance)
        grad = jax.grad(lambda logp: aggregators.token_mean(estimate(logp, x.ref_logp), x.mask)[0])(
            x.logp
        )
        np.testing.assert_allclose(grad, case["grad"], rtol=tolerance, atol=tolerance)


@PRECISION
def test_the_peers_importance_weights(dtype, tolerance):
    """The weights that verl's and TRL's cases were given, from the two policies."""
    with jax.enable_x64(dtype == "float64"):
        x = Inputs(dtype)
        sampler = jnp.array(FILE["inputs"]["rollout_logp"], dtype)
        by_token = losses.truncated_importance_weight(x.old_logp, sampler, x.mask)
        by_sequence = losses.masked_importance_weight(
            x.old_logp, sampler, x.mask, level="sequence", low=0.0, high=3.0
        )
        (verl,) = [c["params"]["is_weights"] for c in CASES if c["params"].get("is_weights")]
        (trl,) = [c["params"]["is_ratio"] for c in CASES if c["params"].get("is_ratio")]
        near = dict(rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(by_token * x.mask.astype(dtype), verl, **near)
        np.testing.assert_allclose(by_sequence[:, :1], trl, **near)
