"""prompts -> sampler -> rewards -> Rollouts, and Rollouts -> LearnerBatch."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fgrpo_jax import distributed, sharding
from fgrpo_jax.answers import Score
from fgrpo_jax.rewards import Scorer
from fgrpo_jax.structs import LearnerBatch, Prompts, Rollouts, Samples
from fgrpo_jax.tokenizer import Tokenizer

Collect = Callable[[Any, Prompts, jax.Array], Callable[[], Rollouts]]


def make_collect(
    sample: Callable[[Any, jax.Array, jax.Array, jax.Array], Samples],
    samples: int,
    tokenizer: Tokenizer,
    scorer: Scorer,
    mesh: Mesh,
    wrong: float = 0.0,
    right: float = 1.0,
    drop_truncated: bool = False,
) -> Collect:
    """collect(params, prompts, key) -> finish, finish() -> Rollouts; params in the `decode` layout.

    The samples are there when collect returns, and their scores when finish does: what is sampled
    in between does not wait for the judges.

    A score of 0 is rewarded by `wrong`, one of 1 by `right`. Each row's key derives from `key`,
    the prompt's position and the sample's number, so that a row is the same in any batch and on
    any mesh. With drop_truncated, cut-off samples are invalid: they leave their group.
    """
    rows = sharding.activation(mesh, "B")

    @jax.jit
    def row_keys(key, position_P):
        prompt_keys = jax.vmap(jax.random.fold_in, (None, 0))(key, position_P)
        keys = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))
        return keys(prompt_keys, jnp.arange(samples)).reshape(-1)

    def collect(params: Any, prompts: Prompts, key: jax.Array) -> Callable[[], Rollouts]:
        position_P = distributed.to_global(prompts.position_P, rows)
        out = sample(
            params,
            distributed.to_global(prompts.tokens_PC, sharding.activation(mesh, "BT")),
            distributed.to_global(prompts.length_P, rows),
            row_keys(key, position_P),
        )
        out = distributed.to_host(out)
        real = len(prompts.problems) * samples  # the rest fills up the last batch of a set
        responses = tuple(
            tokenizer.decode(tokens[mask].tolist())
            for tokens, mask in zip(out.tokens_BT[:real], out.mask_BT[:real], strict=True)
        )
        problems = [problem for problem in prompts.problems for _ in range(samples)]
        started = scorer.start(problems, responses, out.finished_B[:real])
        return lambda: scored(prompts, out, responses, list(started))

    def scored(
        prompts: Prompts, out: Samples, responses: tuple[str, ...], scores: list[Score]
    ) -> Rollouts:
        real = len(responses)
        reward_B = np.array([s.reward for s in scores], np.float32)
        reward_B = np.where(reward_B == 1, right, wrong + (right - wrong) * reward_B)
        correct_B = np.array([s.correct for s in scores], np.float32)
        valid_B = out.finished_B[:real] | (not drop_truncated)
        return Rollouts(
            prompts,
            out.tokens_BT,
            out.mask_BT,
            out.logp_BT,
            out.finished_B,
            reward_B.astype(np.float32).reshape(-1, samples),
            correct_B.reshape(-1, samples),
            valid_B.reshape(-1, samples),
            responses,
            tuple(s.info for s in scores),
        )

    return collect


def learner_batch(
    rollouts: Rollouts,
    advantage_PN: np.ndarray | jax.Array,
    minibatches: int,
    microbatches: int,
    mesh: Mesh,
    mask_truncated: bool = False,
    with_lengths: bool = False,
) -> LearnerBatch:
    """The rows of all hosts on the mesh, each split as [minibatches, microbatches, rows].

    Args:
        mask_truncated: whether cut-off samples, as invalid ones always, leave the loss.
        with_lengths: whether to carry the lengths of each row's group.
    """
    samples = rollouts.tokens_BT.shape[0] // rollouts.prompts.tokens_PC.shape[0]
    tokens_PC, length_P = rollouts.prompts.tokens_PC, rollouts.prompts.length_P
    prompt_BC = np.repeat(tokens_PC, samples, axis=0)
    start_B = np.repeat(tokens_PC.shape[1] - length_P, samples)
    trained_B = rollouts.valid_PN.reshape(-1) & (rollouts.finished_B | (not mask_truncated))
    length_BN = None
    if with_lengths:
        length_B = rollouts.mask_BT.sum(axis=1, dtype=np.int32) * trained_B
        length_PN = length_B.reshape(-1, samples)
        own_first = [np.roll(length_PN, -n, axis=1) for n in range(samples)]
        length_BN = np.stack(own_first, axis=1).reshape(-1, samples)
    batch = LearnerBatch(
        tokens_BS=np.concatenate([prompt_BC, rollouts.tokens_BT], axis=1),
        start_B=start_B,
        mask_BT=rollouts.mask_BT & trained_B[:, None],
        advantage_B=np.asarray(advantage_PN).reshape(-1),
        sampler_logp_BT=rollouts.sampler_logp_BT,
        ref_logp_BT=rollouts.ref_logp_BT,
        length_BN=length_BN,
    )
    return put_batch(batch, minibatches, microbatches, mesh)


def put_batch(batch: LearnerBatch, minibatches: int, microbatches: int, mesh: Mesh) -> LearnerBatch:
    """Splits this host's rows, and lays each microbatch over all devices that share rows."""

    def put(x: np.ndarray) -> jax.Array:
        x = x.reshape(minibatches, microbatches, -1, *x.shape[1:])
        axes = "ZZB" if x.ndim == 3 else "ZZBT"
        return distributed.to_global(x, sharding.activation(mesh, axes))

    return jax.tree.map(put, batch)
