"""prompts -> sampler -> rewards -> Rollouts, and Rollouts -> LearnerBatch."""

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from fgrpo_jax import distributed, packing, sharding
from fgrpo_jax.answers import Score
from fgrpo_jax.layout import SamplerSettings
from fgrpo_jax.rewards import Scorer
from fgrpo_jax.sampler import Stream, gather
from fgrpo_jax.structs import LearnerBatch, Prompts, Response, Rollouts, Watch, unwatched

Collect = Callable[[Any, Prompts, jax.Array, Watch], Rollouts]


def make_collect(
    stream: Stream,
    settings: SamplerSettings,
    text_of: Callable[[np.ndarray], str],
    scorer: Scorer,
    wrong: float = 0.0,
    right: float = 1.0,
    drop_truncated: bool = False,
    scoring: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Collect:
    """collect(params, prompts, key, watch) -> Rollouts; params in the `decode` layout.

    Responses are judged as they end, while others are still sampled.

    Args:
        text_of: decodes a response's tokens.
        wrong, right: what scores of 0 and 1 are rewarded by.
        drop_truncated: whether cut-off samples are invalid: they leave their group.
        scoring: entered while the host has sampled all and waits for verdicts.
    """
    N = settings.samples

    def collect(
        params: Any, prompts: Prompts, key: jax.Array, watch: Watch = unwatched
    ) -> Rollouts:
        real = len(prompts.problems) * N  # the rest fills up the last batch of a set
        texts: dict[int, str] = {}
        scores: dict[int, Score] = {}
        judged = []

        def judge(responses: list[Response]) -> list[Response]:
            new = {response.row: text_of(response.tokens) for response in responses}
            problems = [prompts.problems[row // N] for row in new]
            finished = [response.finished for response in responses]
            judged.append((new, scorer.start(problems, list(new.values()), finished)))
            texts.update(new)
            return responses

        samples = gather(
            map(judge, stream(params, prompts, key, watch)), len(prompts.length_P) * N, settings
        )
        with scoring():
            for rows, begun in judged:
                scores.update(zip(rows, begun, strict=True))
        ordered = [scores[row] for row in range(real)]
        reward_B = np.array([score.reward for score in ordered], np.float32)
        reward_B = np.where(reward_B == 1, right, wrong + (right - wrong) * reward_B)
        correct_B = np.array([score.correct for score in ordered], np.float32)
        valid_B = samples.finished_B[:real] | (not drop_truncated)
        return Rollouts(
            prompts,
            samples.tokens_BT,
            samples.mask_BT,
            samples.logp_BT,
            samples.finished_B,
            reward_B.astype(np.float32).reshape(-1, N),
            correct_B.reshape(-1, N),
            valid_B.reshape(-1, N),
            tuple(texts[row] for row in range(real)),
            tuple(score.info for score in ordered),
            drawn_logp_BT=samples.drawn_logp_BT,
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
    pack: int = 0,
    whole: bool = False,
    widths: tuple[int, ...] = (),
    shared: int = 1,
) -> LearnerBatch:
    """The rows of all hosts on the mesh, each split as [minibatches, microbatches, rows].

    Args:
        mask_truncated: whether cut-off samples, as invalid ones always, leave the loss.
        with_lengths: whether to carry the lengths of each row's group.
        pack: response columns of a packed row; 0: every row is a response.
        whole: whether packed rows hold whole sequences, as packing.pack's.
        widths: response columns that the update is compiled for, ascending; with several, rows
            of like length share a microbatch, and `shared` rows of a prompt stay adjacent.
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
        drawn_logp_BT=rollouts.drawn_logp_BT,
        ref_logp_BT=rollouts.ref_logp_BT,
        length_BN=length_BN,
    )
    if pack:
        micro_rows = len(batch.mask_BT) // (minibatches * microbatches)
        batch = packing.pack(batch, samples, minibatches, micro_rows, pack, whole)
        microbatches = len(batch.part_Bs) // (minibatches * micro_rows)
    elif len(widths) > 1:
        batch = packing.by_length(batch, samples, shared, minibatches, microbatches, widths)
    return put_batch(batch, minibatches, microbatches, mesh)


def put_batch(batch: LearnerBatch, minibatches: int, microbatches: int, mesh: Mesh) -> LearnerBatch:
    """Splits this host's rows, and lays each microbatch over all devices that share rows."""

    def put(x: np.ndarray) -> jax.Array:
        x = x.reshape(minibatches, microbatches, -1, *x.shape[1:])
        axes = "ZZB" if x.ndim == 3 else "ZZBT"
        return distributed.to_global(x, sharding.activation(mesh, axes))

    placed = jax.tree.map(put, dataclasses.replace(batch, used_Z=None, width_ZZ=None))
    numbers = {"used_Z": batch.used_Z, "width_ZZ": batch.width_ZZ}
    return dataclasses.replace(placed, **jax.device_put(numbers, sharding.replicated(mesh)))
