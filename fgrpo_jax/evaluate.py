"""pass@1 and pass@k of a policy on held-out problems."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from fgrpo_jax import distributed, prompts
from fgrpo_jax.pass_at_k import pass_at_k, powers_up_to
from fgrpo_jax.prompts import PromptSet
from fgrpo_jax.rollouts import Collect

Result = dict[str, Any]


def make_evaluate(
    collect: Collect, held_out: PromptSet, problems: int, batch: int, samples: int
) -> Callable[[Any, jax.Array], Result]:
    """evaluate(params, key) -> {"pass@1": ..., "pass@2": ..., "by_kind": {kind: pass@1}}.

    Args:
        problems: the first so many of the held-out set.
        batch: prompts at a time.
        samples: n of the estimator, which pass@k averages over the problems.
    """

    def evaluate(params: Any, key: jax.Array) -> Result:
        correct, kinds, unfinished = [], [], []
        share = distributed.share(batch)
        for part in prompts.batches_of(held_out, problems, batch, share):
            unfinished.append(collect(params, part, key))
            if len(unfinished) > 1:  # the judges work while the next batch is sampled
                correct.append(unfinished.pop(0)().correct_PN.sum(axis=1))
            kinds += [problem.kind for problem in part.problems]
        correct += [finish().correct_PN.sum(axis=1) for finish in unfinished]
        correct_P = np.concatenate(correct).astype(int)
        problems_of_all = distributed.total(float(len(correct_P)))
        result: Result = {
            f"pass@{k}": distributed.total(pass_at_k(correct_P, samples, k).sum()) / problems_of_all
            for k in powers_up_to(samples)
        }
        label = np.array(kinds)
        result["by_kind"] = {
            kind: float(correct_P[label == kind].mean() / samples) for kind in sorted(set(kinds))
        }
        return result

    return evaluate
