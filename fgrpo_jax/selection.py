"""The choice of groups and samples: DAPO's dynamic sampling and PODS, on the host."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fgrpo_jax import UserError, distributed
from fgrpo_jax.numerics import group_statistics
from fgrpo_jax.shaping import max_variance_subset
from fgrpo_jax.structs import Prompts, Rollouts, Watch, unwatched

BY_ROW = "tokens_BT mask_BT sampler_logp_BT drawn_logp_BT finished_B ref_logp_BT".split()
BY_SAMPLE = "reward_PN correct_PN valid_PN".split()
BY_PROMPT = "tokens_PC length_P position_P".split()


def take(rollouts: Rollouts, prompt_P: np.ndarray, sample_PM: np.ndarray) -> Rollouts:
    """The groups at prompt_P, and of each the samples at its columns of sample_PM."""
    samples = rollouts.reward_PN.shape[1]
    rows = (prompt_P[:, None] * samples + sample_PM).reshape(-1)
    prompts = rollouts.prompts
    by_prompt: dict[str, Any] = {name: getattr(prompts, name)[prompt_P] for name in BY_PROMPT}
    arrays: dict[str, Any] = {
        name: array[rows] for name in BY_ROW if (array := getattr(rollouts, name)) is not None
    }
    for name in BY_SAMPLE:
        arrays[name] = np.take_along_axis(getattr(rollouts, name)[prompt_P], sample_PM, axis=1)
    return dataclasses.replace(
        rollouts,
        prompts=Prompts(**by_prompt, problems=tuple(prompts.problems[p] for p in prompt_P)),
        responses=tuple(rollouts.responses[row] for row in rows),
        verdicts=tuple(rollouts.verdicts[row] for row in rows),
        **arrays,
    )


def join(parts: Sequence[Rollouts]) -> Rollouts:
    """One after the other."""
    if len(parts) == 1:
        return parts[0]

    def of(items: Sequence[Any], name: str) -> Any:
        values = [getattr(item, name) for item in items]
        return sum(values, ()) if isinstance(values[0], tuple) else np.concatenate(values)

    batches = [part.prompts for part in parts]
    return dataclasses.replace(
        parts[0],
        prompts=Prompts(**{name: of(batches, name) for name in (*BY_PROMPT, "problems")}),
        **{
            name: of(parts, name)
            for name in (*BY_ROW, *BY_SAMPLE, "responses", "verdicts")
            if getattr(parts[0], name) is not None
        },
    )


def mixed_groups(rollouts: Rollouts) -> np.ndarray:
    """Which groups have both right and wrong samples, by raw correctness: bool [P]."""
    groups = group_statistics(jnp.asarray(rollouts.correct_PN), jnp.asarray(rollouts.valid_PN))
    return ~np.asarray(groups.constant[:, 0])


Draw = Callable[[Any, int, jax.Array, Watch], tuple[Rollouts, Rollouts, int]]


def make_draw(
    collect: Callable[[Any, Prompts, jax.Array, Watch], Rollouts],
    prompts_at: Callable[[int], Prompts],
    attempts: int,
    only_mixed: bool,
) -> Draw:
    """draw(params, position, key, watch) -> (the step's rollouts, all sampled, next position).

    Where only groups with both right and wrong samples count (DAPO's dynamic sampling, arXiv
    2503.14476), batches of prompts are drawn until there are as many such groups as prompts in a
    batch, or UserError after so many attempts. Each host fills its own share. A row's samples
    depend on its prompt's position alone, not on the attempt.
    """

    def draw(
        params: Any, position: int, key: jax.Array, watch: Watch = unwatched
    ) -> tuple[Rollouts, Rollouts, int]:
        if not only_mixed:
            rollouts = collect(params, prompts_at(position), key, watch)
            return rollouts, rollouts, position + 1
        parts: list[Rollouts] = []
        mixed: list[np.ndarray] = []  # of each part
        have = want = 0
        for attempt in range(attempts):
            parts.append(collect(params, prompts_at(position + attempt), key, watch))
            mixed.append(mixed_groups(parts[-1]))
            want = len(parts[0].prompts.problems)
            have += mixed[-1].sum()
            if not distributed.total(max(want - have, 0)):
                drawn = join(parts)
                chosen = np.flatnonzero(np.concatenate(mixed))[:want]
                everything = np.arange(drawn.reward_PN.shape[1])
                everything = np.broadcast_to(everything, (want, len(everything)))
                return take(drawn, chosen, everything), drawn, position + attempt + 1
        have, want = (round(distributed.total(number)) for number in (have, want))
        raise UserError(
            f"{attempts} batches of prompts gave {have} groups with both right and wrong answers, "
            f"and a step needs {want}: raise rollout.attempts or algo.group_size, or take problems "
            "that are neither too hard nor too easy"
        )

    return draw


def most_varied(rollouts: Rollouts, size: int) -> Rollouts:
    """PODS: of each group the samples whose rewards vary most; size 0: all."""
    if not size:
        return rollouts
    subset_PM = np.asarray(max_variance_subset(rollouts.reward_PN, size, rollouts.valid_PN))
    return take(rollouts, np.arange(len(subset_PM)), subset_PM)
