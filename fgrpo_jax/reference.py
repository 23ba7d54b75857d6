"""The reference policy of a KL penalty: its log-probabilities of a step's rollouts."""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from fgrpo_jax import distributed, sharding, weights
from fgrpo_jax.logprobs import batch_logprobs
from fgrpo_jax.model import Policy
from fgrpo_jax.rollouts import learner_batch
from fgrpo_jax.structs import LearnerBatch, Rollouts


def make_reference(
    policy: Policy,
    folder: pathlib.Path,
    temperature: float,
    chunk: int,
    microbatch: int,
    mesh: Mesh,
) -> Callable[[Rollouts], Rollouts]:
    """reference(rollouts) -> rollouts with ref_logp_BT.

    Its weights lie as the trained ones, in the compute dtype; it is a Hugging Face folder of the
    policy's own shape.

    Args:
        temperature, chunk: as in the update.
        microbatch: rows of all hosts in memory at a time.
    """
    loaded = weights.load(folder, policy, mesh)
    cast = lambda params: jax.tree.map(lambda x: x.astype(policy.dtype), params)
    layout = sharding.state_shardings(mesh, loaded)
    params = jax.jit(cast, out_shardings=layout, donate_argnums=0)(loaded)
    out = sharding.activation(mesh, "ZZBT")
    shards = mesh.shape["replica"] * mesh.shape["fsdp"]

    @functools.partial(jax.jit, out_shardings=out, static_argnames="samples")
    def reference_logprobs(params: Any, batch: LearnerBatch, samples: int) -> jax.Array:
        with jax.named_scope("reference"):
            return batch_logprobs(policy, params, batch, temperature, chunk, samples)

    def reference(rollouts: Rollouts) -> Rollouts:
        rows = round(distributed.total(len(rollouts.mask_BT)))
        pieces = (n for n in range(-(-rows // microbatch), rows + 1) if rows % (n * shards) == 0)
        advantage_PN = np.zeros(rollouts.reward_PN.shape, np.float32)
        microbatches = next(pieces)
        batch = learner_batch(rollouts, advantage_PN, 1, microbatches, mesh)
        # a device's rows of a microbatch are adjacent, so are a prompt's
        samples = math.gcd(rows // microbatches // shards, rollouts.reward_PN.shape[1])
        logp = distributed.to_host(reference_logprobs(params, batch, samples=samples), axis=2)
        logp_BT = logp.reshape(rollouts.mask_BT.shape)
        return dataclasses.replace(rollouts, ref_logp_BT=logp_BT)

    return reference
