"""pass@k, maj@n and lengths of a policy on held-out problems.

Streamed: no text is kept, and a problem that is done before an interruption is not sampled again.
"""

import collections
import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from fgrpo_jax import distributed, jsons, storage
from fgrpo_jax.answers import EXTRACT, Score, normalise, plain_number
from fgrpo_jax.pass_at_k import pass_at_k, powers_up_to
from fgrpo_jax.prompts import PromptSet
from fgrpo_jax.rewards import Scorer
from fgrpo_jax.sampler import Stream
from fgrpo_jax.structs import Problem, Response, Watch, unwatched

Result = dict[str, Any]
BACKLOG = 4  # chunks of responses whose scores may be awaited
FIELDS = ("correct", "truncated", "tokens", "majority")  # a problem's, of all its samples


class Answered(NamedTuple):
    """A response to a problem."""

    problem: int  # its place in the set
    text: str
    tokens: int
    finished: bool  # by itself, not at the limit


@dataclasses.dataclass(frozen=True)
class Tally:
    """Of a problem whose samples are all judged."""

    correct: int  # samples
    truncated: int  # samples that came to no stop
    tokens: int  # of all samples
    majority: float | None  # chance that the most frequent answer, ties drawn, is right; None: the
    # reward compares no answers


class Tallies:
    """The problems that are done, in a JSON Lines file of this host."""

    def __init__(self, path: pathlib.Path, samples: int):
        self.path, self.samples = path, samples
        self.done: dict[int, Tally] = {}  # by the problem's place in the set
        for line in jsons.read_lines(path):
            try:
                record = jsons.parse(line)
                problem, of = record.pop("problem"), record.pop("samples")
                tally = Tally(**record)
                whole = [problem, tally.correct, tally.truncated, tally.tokens]
                chance = 0.0 if tally.majority is None else tally.majority
                good = all(type(x) is int and x >= 0 for x in whole) and 0 <= chance <= 1
                if good and max(whole[1:3]) <= samples == of:
                    self.done[problem] = tally
            except (ValueError, KeyError, TypeError, AttributeError):
                break  # a killed process was writing here: what follows is sampled again
        storage.write(path, "".join(map(self._line, self.done)))

    def _line(self, problem: int) -> str:
        fields = dataclasses.asdict(self.done[problem])
        return json.dumps({"problem": problem, "samples": self.samples} | fields) + "\n"

    def add(self, problem: int, tally: Tally) -> None:
        self.done[problem] = tally
        storage.append(self.path, self._line(problem))

    def table(self, problems: int) -> Float[np.ndarray, "P 4"]:
        """FIELDS of the problems, each from its host's file; nan where there is no majority."""
        mine = np.zeros((problems, len(FIELDS)))
        for problem, tally in self.done.items():
            if problem in mine_of(problems):
                mine[problem] = [np.nan if x is None else x for x in dataclasses.astuple(tally)]
        return distributed.totals(mine)


def mine_of(problems: int) -> range:
    """This host's share of them."""
    return range(distributed.host(), problems, distributed.hosts())


def judge(
    batches: Iterable[Sequence[Answered]],
    problems: Sequence[Problem],
    scorer: Scorer,
    tallies: Tallies,
) -> None:
    """Scores all samples of problems that are not done, in any order, and adds their tallies."""
    extract = EXTRACT.get(scorer.reward)
    scored = collections.defaultdict(list)  # (response, its score), of problems that are not done
    waiting: collections.deque[tuple[Sequence[Answered], Iterator[Score]]] = collections.deque()

    def settle() -> None:
        for response, score in zip(*waiting.popleft(), strict=True):
            answer = extract(response.text) if extract else None
            mine = scored[response.problem]
            mine.append((answer, score.correct, response.tokens, response.finished))
            if len(mine) == tallies.samples:
                tallies.add(response.problem, _tally(scored.pop(response.problem), bool(extract)))

    for batch in batches:
        asked = [problems[response.problem] for response in batch]
        texts = [response.text for response in batch]
        finished = [response.finished for response in batch]
        waiting.append((batch, scorer.start(asked, texts, finished)))
        if len(waiting) > BACKLOG:
            settle()
    while waiting:
        settle()


def _tally(samples: list[tuple[str | None, bool, int, bool]], voted: bool) -> Tally:
    answers, correct, tokens, finished = zip(*samples, strict=True)
    votes: collections.Counter[Any] = collections.Counter()
    right: collections.Counter[Any] = collections.Counter()
    for answer, is_right in zip(answers, correct, strict=True):
        if answer is not None:
            plain = normalise(answer)
            number = plain_number(plain)
            key = plain if number is None else number
            votes[key] += 1
            right[key] += is_right
    most = max(votes.values(), default=0)
    winners = [right[key] / votes[key] for key in votes if votes[key] == most]
    majority = sum(winners) / len(winners) if winners else 0.0
    truncated = len(finished) - sum(finished)
    return Tally(sum(correct), truncated, sum(tokens), majority if voted else None)


def summary(
    table: Float[np.ndarray, "P 4"],
    problems: Sequence[Problem],
    samples: int,
    ks: Sequence[int] | None = None,
) -> Result:
    """pass@k (powers of two and `samples`, if not said), maj@n, lengths, pass@1 by kind."""
    correct_P = table[:, 0].astype(int)
    ks = powers_up_to(samples) if ks is None else ks
    out: Result = {f"pass@{k}": float(pass_at_k(correct_P, samples, k).mean()) for k in ks}
    if not np.isnan(table[:, 3]).any():
        out[f"maj@{samples}"] = float(table[:, 3].mean())
    out["response_tokens"] = float(table[:, 2].mean() / samples)
    out["truncated"] = float(table[:, 1].mean() / samples)
    label_P = np.array([problem.kind for problem in problems])
    out["by_kind"] = {
        str(kind): float(correct_P[label_P == kind].mean() / samples) for kind in np.unique(label_P)
    }
    return out


def sample(
    stream: Stream,
    text_of: Callable[[np.ndarray], str],
    scorer: Scorer,
    asked: PromptSet,
    problems: int,
    multiple: int,
    tallies: Tallies,
    params: Any,
    key: jax.Array,
    watch: Watch = unwatched,
) -> Float[np.ndarray, "P 4"]:
    """Samples and judges this host's share of the first `problems` that are not done; FIELDS of
    all of them.

    Args:
        stream: of make_sampler, with tallies.samples samples a prompt.
        text_of: decodes a response's tokens.
        multiple: prompts of all hosts together come in multiples of this.
    """
    left = [i for i in mine_of(problems) if i not in tallies.done]
    # as many on each host, by empty prompts
    size = int(distributed.largest(len(left)))
    size += -size % max(1, multiple // distributed.hosts())
    indices = np.array(left + [-1] * (size - len(left)), np.int32)

    def answered(response: Response) -> Answered:
        problem, text = left[response.row // tallies.samples], text_of(response.tokens)
        return Answered(problem, text, len(response.tokens), response.finished)

    if size:
        responses = stream(params, asked.batch(indices, np.maximum(indices, 0)), key, watch)
        judge((list(map(answered, some)) for some in responses), asked.problems, scorer, tallies)
    watch(size, size, 0, 0)  # all is judged
    return tallies.table(problems)


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
    """evaluate(params, key, step, watch) -> summary, of the first so many `problems` of the set.

    Args:
        samples: n of the estimator, which pass@k averages over the problems.
        folder: of each evaluation's tallies, by problem.
        stream, text_of, multiple: as `sample`.
    """
    total = min(problems, len(held_out.problems))

    def evaluate(params: Any, key: jax.Array, step: int, watch: Watch = unwatched) -> Result:
        tallies = Tallies(folder / f"step_{step}.{distributed.host()}.jsonl", samples)
        table = sample(
            stream, text_of, scorer, held_out, total, multiple, tallies, params, key, watch
        )  # fmt: skip
        return summary(table, held_out.problems[:total], samples)

    return evaluate
