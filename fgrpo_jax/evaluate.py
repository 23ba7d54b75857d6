"""pass@1 and pass@k of a policy on held-out problems.

Streamed: no text is kept, and a problem that is done before an interruption is not sampled again.
"""

import collections
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from fgrpo_jax import distributed, jsons, storage
from fgrpo_jax.answers import Score
from fgrpo_jax.pass_at_k import pass_at_k, powers_up_to
from fgrpo_jax.prompts import PromptSet
from fgrpo_jax.rewards import Scorer
from fgrpo_jax.sampler import Stream
from fgrpo_jax.structs import Response, Watch, unwatched

Result = dict[str, Any]
BACKLOG = 4  # chunks of the decode loop whose scores may be awaited


class Counts:
    """Right answers of each problem that is done, in a JSON Lines file of this host."""

    def __init__(self, path: pathlib.Path, samples: int):
        self.path, self.samples = path, samples
        self.correct: dict[int, int] = {}  # by the problem's place in the set
        for line in jsons.read_lines(path):
            try:
                record = jsons.parse(line)
                problem, of, correct = (record[key] for key in ("problem", "samples", "correct"))
                counts = type(problem) is type(correct) is int and 0 <= correct <= samples
                if counts and of == samples:
                    self.correct[problem] = correct
            except (ValueError, KeyError, TypeError):
                break  # a killed process was writing here: what follows is sampled again
        storage.write(path, "".join(map(self._line, self.correct)))

    def _line(self, problem: int) -> str:
        correct = self.correct[problem]
        return json.dumps({"problem": problem, "samples": self.samples, "correct": correct}) + "\n"

    def add(self, problem: int, correct: int) -> None:
        self.correct[problem] = correct
        storage.append(self.path, self._line(problem))


def make_evaluate(
    stream: Stream,
    text_of: Callable[[np.ndarray], str],
    scorer: Scorer,
    held_out: PromptSet,
    problems: int,
    samples: int,
    multiple: int,
    folder: pathlib.Path,
) -> Callable[..., Result]:
    """evaluate(params, key, step, watch) -> {"pass@1": ..., "by_kind": {kind: pass@1}}.

    Args:
        stream: of make_sampler, with so many samples a prompt.
        text_of: decodes a response's tokens.
        problems: the first so many of the held-out set.
        samples: n of the estimator, which pass@k averages over the problems.
        multiple: prompts of all hosts together come in multiples of this.
        folder: of each evaluation's counts of right answers, by problem.
    """
    total = min(problems, len(held_out.problems))

    def evaluate(params: Any, key: jax.Array, step: int, watch: Watch = unwatched) -> Result:
        positions = np.arange(total)
        mine = positions[distributed.host() :: distributed.hosts()]
        counts = Counts(folder / f"step_{step}.{distributed.host()}.jsonl", samples)
        left = [int(i) for i in mine if i not in counts.correct]
        # as many on each host, by empty prompts
        size = int(distributed.largest(len(left)))
        size += -size % max(1, multiple // distributed.hosts())
        indices = np.array(left + [-1] * (size - len(left)), np.int32)
        if size:
            batch = held_out.batch(indices, np.maximum(indices, 0))
            judge(stream(params, batch, key, watch), left, counts)
        watch(size, size, 0, 0)  # all is judged
        return result(counts, mine)

    def judge(responses: Iterator[list[Response]], left: list[int], counts: Counts) -> None:
        scores = collections.defaultdict(list)  # of problems that are not done
        waiting: collections.deque[tuple[list[int], Iterator[Score]]] = collections.deque()

        def settle() -> None:
            for problem, score in zip(*waiting.popleft(), strict=True):
                scores[problem].append(score.correct)
                if len(scores[problem]) == samples:
                    counts.add(problem, sum(scores.pop(problem)))

        for some in responses:
            whose = [left[response.row // samples] for response in some]
            texts = [text_of(response.tokens) for response in some]
            finished = [response.finished for response in some]
            asked = [held_out.problems[problem] for problem in whose]
            waiting.append((whose, scorer.start(asked, texts, finished)))
            if len(waiting) > BACKLOG:
                settle()
        while waiting:
            settle()

    def result(counts: Counts, mine: np.ndarray) -> Result:
        correct_P = np.array([counts.correct[int(i)] for i in mine], int)
        out: Result = {
            f"pass@{k}": distributed.total(pass_at_k(correct_P, samples, k).sum()) / total
            for k in powers_up_to(samples)
        }
        kinds = sorted({held_out.problems[i].kind for i in range(total)})
        label = np.array([held_out.problems[i].kind for i in mine])
        right, of = distributed.totals(
            [[correct_P[label == kind].sum(), (label == kind).sum() * samples] for kind in kinds]
        ).T
        out["by_kind"] = dict(zip(kinds, (right / of).tolist(), strict=True))
        return out

    return evaluate
