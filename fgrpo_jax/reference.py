"""The reference policy of a KL penalty: its log-probabilities of a step's rollouts."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from fgrpo_jax import distributed, sharding
from fgrpo_jax.logprobs import make_logprobs
from fgrpo_jax.model import Policy
from fgrpo_jax.rollouts import learner_batch
from fgrpo_jax.structs import Rollouts


def make_reference(
    policy: Policy,
    params: Any,
    temperature: float,
    chunk: int,
    microbatch: int,
    mesh: Mesh,
    offload: bool = False,
) -> Callable[[Rollouts], Rollouts]:
    """reference(rollouts) -> rollouts with ref_logp_BT.

    Args:
        params: of a policy of the same shape, in the `train` layout.
        temperature, chunk: as in the update.
        microbatch: rows of all hosts in memory at a time.
        offload: whether the params, which are then taken away from the caller, wait in the hosts'
            memory while they are not used.
    """
    layout = sharding.state_shardings(mesh, params)
    if offload:
        in_host = jax.tree.map(lambda place: place.with_memory_kind("pinned_host"), layout)
        there = jax.block_until_ready(jax.device_put(params, in_host))
        jax.tree.map(lambda x: x.delete(), params)
        params = there
    shards = mesh.shape["replica"] * mesh.shape["fsdp"]
    logprobs = make_logprobs(policy, temperature, chunk, mesh, "reference")

    def reference(rollouts: Rollouts) -> Rollouts:
        rows = round(distributed.total(len(rollouts.mask_BT)))
        pieces = (n for n in range(-(-rows // microbatch), rows + 1) if rows % (n * shards) == 0)
        advantage_PN = np.zeros(rollouts.reward_PN.shape, np.float32)
        microbatches = next(pieces)
        batch = learner_batch(rollouts, advantage_PN, 1, microbatches, mesh)
        # a device's rows of a microbatch are adjacent, so are a prompt's
        samples = math.gcd(rows // microbatches // shards, rollouts.reward_PN.shape[1])
        here = jax.device_put(params, layout) if offload else params
        logp = distributed.to_host(logprobs(here, batch, samples=samples), axis=2)
        logp_BT = logp.reshape(rollouts.mask_BT.shape)
        return dataclasses.replace(rollouts, ref_logp_BT=logp_BT)

    return reference
