"""Sources of problems, tokenised, filtered and shuffled: batch(step) is one integer's business."""

import dataclasses
import json
import pathlib
from collections.abc import Iterator

import grain
import numpy as np

from fgrpo_jax import UserError, arithmetic
from fgrpo_jax.config import Config
from fgrpo_jax.structs import Problem, Prompts
from fgrpo_jax.tokenizer import Tokenizer

ARITHMETIC = 16_384  # problems of the embedded task's train split; each kind has its share


def read(source: str, split: str, slips: float) -> list[Problem]:
    """The problems of a source: arithmetic[:KINDS], or jsonl:PATH. Raises UserError."""
    kind, _, rest = source.partition(":")
    if kind == "arithmetic":
        return arithmetic.generate(ARITHMETIC, split, rest, slips=slips)
    problems, number = [], 0
    try:
        with pathlib.Path(rest).open(encoding="utf-8") as file:
            for line in file:
                number += 1
                if line.strip():
                    row = json.loads(line)
                    text, answer = str(row["problem"]), str(row["answer"])
                    problems.append(Problem(text, answer, pathlib.Path(rest).stem))
    except FileNotFoundError:
        raise UserError(f"data file {rest} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"data file {rest} cannot be read: {error}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(
            f'data file {rest}, line {number}: not a JSON object with "problem" and "answer"'
        ) from error
    if not problems:
        raise UserError(f"data file {rest} has no problem: it is empty")
    return problems


@dataclasses.dataclass(frozen=True)
class PromptSet:
    """Tokenised problems of a split."""

    problems: tuple[Problem, ...]
    tokens: tuple[list[int], ...]
    width: int  # C, columns of a batch
    dropped: int  # problems whose prompt was longer

    def batch(self, indices: np.ndarray, positions: np.ndarray) -> Prompts:
        """Left-padded prompts; an index of -1 gives an empty one."""
        tokens_PC = np.zeros((len(indices), self.width), np.int32)
        length_P = np.zeros(len(indices), np.int32)
        for row, index in enumerate(indices):
            ids = self.tokens[index] if index >= 0 else []
            length_P[row] = len(ids)
            tokens_PC[row, self.width - len(ids) :] = ids
        return Prompts(
            tokens_PC,
            length_P,
            np.asarray(positions, np.int32),
            tuple(self.problems[index] for index in indices if index >= 0),
        )


def load(c: Config, source: str, split: str, tokenizer: Tokenizer) -> PromptSet:
    """The problems of a source, rendered by the chat template; too long ones are dropped."""
    problems = read(source, split, c.sft.slips)
    users = [c.data.template.replace("{problem}", problem.text) for problem in problems]
    texts = [tokenizer.render(user, c.data.system) for user in users]
    rows = [
        (problem, ids)
        for problem, ids in zip(problems, tokenizer.encode(texts), strict=True)
        if len(ids) <= c.data.max_prompt
    ]
    if not rows:
        raise UserError(
            f"all {len(problems)} prompts of {source} are longer than data.max_prompt, "
            f"{c.data.max_prompt} tokens"
        )
    kept, tokens = zip(*rows, strict=True)
    return PromptSet(kept, tokens, c.data.max_prompt, len(problems) - len(rows))


def batch_at(prompts: PromptSet, step: int, size: int, seed: int, share: slice) -> Prompts:
    """This host's share of the step's `size` prompts: an endless stream over the set, shuffled
    anew each epoch by the seed, of which batch `step` is positions step * size and on."""
    stream = grain.MapDataset.range(len(prompts.problems)).seed(seed).shuffle().repeat()
    positions = np.arange(step * size, (step + 1) * size)[share]
    return prompts.batch(np.array([stream[int(i)] for i in positions]), positions)


def batches_of(prompts: PromptSet, count: int, size: int, share: slice) -> Iterator[Prompts]:
    """This host's share of the first `count` problems, in order, `size` at a time over all hosts;
    the last batch is filled up with empty prompts."""
    count = min(count, len(prompts.problems))
    for start in range(0, count, size):
        positions = np.arange(start, start + size)
        indices = np.where(positions < count, positions, -1)
        yield prompts.batch(indices[share], positions[share])
