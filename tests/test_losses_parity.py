"""Values and gradients of verl's own code, in float64 and float32, by public arguments alone."""

import json
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import DATA

from fgrpo_jax import losses
from fgrpo_jax.advantages import group_advantage

PATH = pathlib.Path(os.environ.get("FGRPO_LOSS_PARITY", DATA / "loss_parity.json"))
FILE = json.loads(PATH.read_text())
SURROGATES = {"loss/vanilla": losses.ppo_clip, "loss/cispo": losses.cispo}


def covered(case):
    params = case["params"]
    return (
        case["peer"] == "verl"
        and case["name"] in SURROGATES
        and params["loss_agg_mode"] == "token-mean"
        and params["is_weights"] is None
    )


CASES = [case for case in FILE["cases"] if covered(case)]


def test_there_are_cases():
    assert {case["name"] for case in CASES} == set(SURROGATES) and len(CASES) >= 5


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['name']}-{c['value']:.5f}")
@pytest.mark.parametrize("dtype, tolerance", [("float64", 1e-9), ("float32", 1e-5)])
def test_value_and_gradient(case, dtype, tolerance):
    with jax.enable_x64(dtype == "float64"):
        inputs = FILE["inputs"]
        logp, old_logp = (jnp.array(inputs[name], dtype) for name in ("logp", "old_logp"))
        advantage = jnp.array(FILE["verl_advantages"], dtype)
        advantage = advantage if advantage.ndim == 2 else advantage[:, None]
        mask = jnp.array(inputs["mask"], bool)
        params = case["params"]
        bounds = [params["clip_low"], params["clip_high"]]
        if case["name"] == "loss/vanilla":
            bounds.append(params["clip_c"])

        def loss(logp):
            loss_BT = SURROGATES[case["name"]](logp, old_logp, advantage, *bounds)
            total, count = losses.token_mean(loss_BT, mask)
            return total / count

        value, grad = jax.value_and_grad(loss)(logp)
        np.testing.assert_allclose(value, case["value"], rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(grad, case["grad"], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype, tolerance", [("float64", 1e-9), ("float32", 1e-5)])
def test_advantage(dtype, tolerance):
    (case,) = [c for c in FILE["cases"] if (c["peer"], c["name"]) == ("verl", "adv/grpo")]
    with jax.enable_x64(dtype == "float64"):
        rewards = jnp.array(FILE["inputs"]["rewards"], dtype).reshape(
            -1, FILE["inputs"]["group_size"]
        )
        mask = np.array(FILE["inputs"]["mask"])
        # verl lays it over the tokens
        advantage = np.asarray(group_advantage(rewards)).reshape(-1, 1) * mask
        np.testing.assert_allclose(advantage, case["value"], rtol=tolerance, atol=tolerance)
