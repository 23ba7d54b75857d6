"""Sources of problems, filtered, tokenised and shuffled: batch(step) is one integer's business.

python -m fgrpo_jax.prompts SOURCE prints what a run would see of a source.
"""

import argparse
import dataclasses
import importlib.util
import json
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int
from rich.markup import escape

from fgrpo_jax import UserError, answers, config, forms, sources
from fgrpo_jax import tokenizer as tokenizers
from fgrpo_jax.config import Config
from fgrpo_jax.structs import Problem, Prompts
from fgrpo_jax.tokenizer import Tokenizer

REASONS = (
    "too long",
    "empty gold",
    "unparsable gold",
    "contradicting duplicate",  # the same prompt with another answer: all its copies go
    "duplicate",  # of the same prompt and answer, the first stays
)
CHUNK = 4096  # prompts tokenised at a time: the tokenizer's own objects take 50 times their memory

CheckGolds = Callable[[list[str]], list[bool]]  # whether each can be judged


@dataclasses.dataclass(frozen=True)
class PromptSet:
    """Tokenised problems of a split."""

    problems: tuple[Problem, ...]
    tokens: tuple[np.ndarray, ...]  # int32, of each problem's prompt
    width: int  # C, columns of a batch: tokens of the longest prompt
    dropped: dict[str, int]  # problems left out, by REASONS
    sizes: tuple[int, ...] = ()  # of a weighted mixture: problems of each source, in order
    weights: tuple[float, ...] = ()  # and shares of the stream; empty: all problems alike
    unparsable: tuple[str, ...] = ()  # golds that the judge cannot read

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


def load(
    c: Config,
    source: str,
    split: str,
    tokenizer: Tokenizer,
    check_golds: CheckGolds | None = None,
) -> PromptSet:
    """The problems of a source that can be trained on, rendered by the chat template."""
    tokenizer = tokenizer.with_chat_template(c.data.chat_template)
    problems, part, dropped, unparsable = choose(c, source, split, check_golds)
    kept, tokens = [], []
    messages = [user_message(c, problem) for problem in problems]
    for index, ids in enumerate(token_ids(tokenizer, messages, c.data.system)):
        if len(ids) <= c.data.max_prompt:
            kept.append(index)
            tokens.append(ids)
    dropped["too long"] = len(problems) - len(kept)
    if problems and not kept:
        raise UserError(
            f"all {len(problems)} prompts of {source} are longer than data.max_prompt, "
            f"{c.data.max_prompt} tokens"
        )
    parts = forms.parts(source)
    weights = tuple(p.weight for p in parts if p.weight is not None)
    if weights and importlib.util.find_spec("grain") is None:
        raise UserError(
            f"{source} has weights, and grain mixes: pip install grain, or give no weights"
        )
    sizes = np.bincount([part[index] for index in kept], minlength=len(parts)).tolist()
    for size, each in zip(sizes, parts, strict=True):
        if weights and not size:
            raise UserError(f"{each.source} has a weight, and none of its problems can be used")
    return PromptSet(
        tuple(problems[index] for index in kept),
        tuple(tokens),
        max(map(len, tokens)),
        dropped,
        tuple(sizes) if weights else (),
        weights,
        unparsable,
    )


def token_ids(
    tokenizer: Tokenizer, messages: Sequence[str], system: str, thinking: bool = True
) -> Iterator[Int[np.ndarray, " C"]]:
    """The chat prompt of each user message."""
    for start in range(0, len(messages), CHUNK):
        chunk = messages[start : start + CHUNK]
        texts = [tokenizer.render(message, system, thinking) for message in chunk]
        for ids in tokenizer.encode(texts):
            yield np.array(ids, np.int32)


def summary(loaded: PromptSet) -> str:
    """One line for the terminal: what is kept, what is dropped and why, golds nobody can read."""
    reasons = [f"{count:,} {reason}" for reason, count in loaded.dropped.items() if count]
    line = f"{len(loaded.problems):,} prompts"
    line += f", dropped: {', '.join(reasons)}" if reasons else ", none dropped"
    listed = ", ".join(escape(f"{gold!r:.80}") for gold in loaded.unparsable[:10])
    return f"{line}; unparsable golds: {listed}" if listed else line


def user_message(c: Config, problem: Problem) -> str:
    return c.data.template.replace("{problem}", problem.text)


def choose(
    c: Config, source: str, split: str, check_golds: CheckGolds | None = None
) -> tuple[list[Problem], list[int], dict[str, int], tuple[str, ...]]:
    """(problems, the number of each one's source, dropped, unparsable golds): the problems are
    those that can be judged, once each.

    A generator's repeats stay, since it means them. A problem with data of its own is judged by
    that: its gold is one of several, and may be empty.
    """
    problems: list[Problem] = []
    part: list[int] = []
    parts = forms.parts(source)
    for number, each in enumerate(parts):
        problems += sources.read(each.source, split, c.sft.slips, c.data.fields)
        part += [number] * (len(problems) - len(part))
    may_repeat = [each.kind in forms.GENERATED for each in parts]
    reasons = _reasons(problems, [may_repeat[number] for number in part], check_golds)
    kept = [index for index, reason in enumerate(reasons) if not reason]
    dropped = {reason: reasons.count(reason) for reason in REASONS}
    if not kept:
        counts = ", ".join(f"{count} {reason}" for reason, count in dropped.items() if count)
        raise UserError(f"no problem of {source} can be used: {counts}")
    bad = [index for index, reason in enumerate(reasons) if reason == "unparsable gold"]
    unparsable = tuple(dict.fromkeys(problems[index].answer for index in bad))
    return [problems[index] for index in kept], [part[index] for index in kept], dropped, unparsable


def _reasons(
    problems: list[Problem], may_repeat: list[bool], check_golds: CheckGolds | None
) -> list[str]:
    """Why each problem is dropped; empty where it stays."""
    by_gold = [index for index, problem in enumerate(problems) if problem.data is None]
    golds = list(dict.fromkeys(problems[index].answer for index in by_gold))
    golds = [gold for gold in golds if gold]
    good = dict(zip(golds, check_golds(golds), strict=True)) if check_golds else {}
    reasons = [""] * len(problems)
    golds_of: dict[str, set[str]] = {}
    for index in by_gold:
        gold = problems[index].answer
        if not gold:
            reasons[index] = "empty gold"
        elif not good.get(gold, True):
            reasons[index] = "unparsable gold"
        else:
            # Written otherwise is no contradiction: 1,000 and 1000.
            text = problems[index].text.strip()
            golds_of.setdefault(text, set()).add(answers.normalise(gold))
    seen = set()
    for index, problem in enumerate(problems):
        if reasons[index]:
            continue
        text = problem.text.strip()
        key = text if problem.data is None else (text, repr(problem.data))
        if problem.data is None and len(golds_of[text]) > 1:
            reasons[index] = "contradicting duplicate"
        elif key in seen and not may_repeat[index]:
            reasons[index] = "duplicate"
        seen.add(key)
    return reasons


def batch_at(prompts: PromptSet, step: int, size: int, seed: int, share: slice) -> Prompts:
    """This host's share of the step's `size` prompts: an endless stream over the set, shuffled
    anew each epoch by the seed, of which batch `step` is positions step * size and on."""
    stream = _stream(prompts, seed)
    positions = np.arange(step * size, (step + 1) * size)[share]
    return prompts.batch(np.array([stream[int(i)] for i in positions]), positions)


class _Epochs(Sequence[int]):
    """Endless indices: all of first .. first + size - 1 in each epoch, shuffled anew by the key."""

    def __init__(self, first: int, size: int, *key: int):
        self.first, self.size, self.key = first, size, key
        self.epoch, self.order = -1, np.empty(0, int)  # the last that was asked for

    def __len__(self) -> int:
        return 1 << 62

    def __getitem__(self, index: Any) -> Any:
        epoch, place = divmod(index, self.size)
        if epoch != self.epoch:  # RandomState's numbers no version of numpy may change
            random = np.random.RandomState([*self.key, epoch])
            self.epoch, self.order = epoch, random.permutation(self.size)
        return self.first + int(self.order[place])


def _stream(prompts: PromptSet, seed: int) -> Any:
    """Indices into the set, of any position; each source of a weighted mixture has its epochs."""
    if not prompts.weights:
        return _Epochs(0, len(prompts.problems), seed)
    import grain  # mixes alone

    firsts = np.cumsum(prompts.sizes) - prompts.sizes
    streams = [
        # a key of its own, for sources of equal size would be shuffled alike
        grain.MapDataset.source(_Epochs(int(first), size, seed, number))
        for number, (first, size) in enumerate(zip(firsts, prompts.sizes, strict=True))
    ]
    return grain.MapDataset.mix(streams, prompts.weights)


def report(
    c: Config,
    source: str,
    split: str,
    folder: pathlib.Path | None,
    check_golds: CheckGolds | None = None,
) -> dict[str, object]:
    """What a run would see of a source: counts, lengths of the kept prompts, three examples.
    Without a tokenizer's folder lengths are characters of the bare text, and none is too long."""
    if folder is None:
        problems, _, dropped, unparsable = choose(c, source, split, check_golds)
        system = [c.data.system] if c.data.system else []
        texts = ["\n".join([*system, user_message(c, problem)]) for problem in problems]
        lengths = [len(text) for text in texts]
    else:
        tokenizer = tokenizers.load(folder).with_chat_template(c.data.chat_template)
        loaded = load(c, source, split, tokenizer, check_golds)
        problems, dropped, unparsable = loaded.problems, loaded.dropped, loaded.unparsable
        texts = [
            tokenizer.render(user_message(c, problem), c.data.system) for problem in problems[:3]
        ]
        lengths = [len(ids) for ids in loaded.tokens]
    points = np.quantile(lengths, [0, 0.5, 0.9, 0.99, 1], method="higher").tolist()
    return {
        "source": source,
        "rows": len(problems) + sum(dropped.values()),
        "kept": len(problems),
        "dropped": dropped,
        "unparsable_golds": unparsable,
        "unit": "tokens" if folder else "characters",
        "length": dict(zip("min p50 p90 p99 max".split(), points, strict=True)),
        "examples": [
            {"prompt": text, "gold": problem.answer}
            for text, problem in zip(texts[:3], problems[:3], strict=True)
        ],
    }


def main(argv: Sequence[str]) -> int:
    from fgrpo_jax.rewards import Scorer  # a row below: the command's, not the library's

    parser = argparse.ArgumentParser(prog="python -m fgrpo_jax.prompts", allow_abbrev=False)
    parser.add_argument("source", help="as data.source")
    parser.add_argument("--tokenizer", type=pathlib.Path, help="Hugging Face folder")
    parser.add_argument("--max_prompt", type=int, help="tokens; default: no bound")
    parser.add_argument("--split", default="train", choices=["train", "test"])
    c = config.default()
    keys = "system fields template chat_template".split()
    for key in keys:
        parser.add_argument(f"--{key}", default=c.data[key], help=f"as data.{key}")
    parser.add_argument("--reward", default=c.reward, help="whose golds are checked")
    arguments = parser.parse_args(argv)
    try:
        if arguments.max_prompt is not None and arguments.tokenizer is None:
            raise UserError("--max_prompt counts tokens: give --tokenizer too")
        if arguments.max_prompt is not None and arguments.max_prompt < 1:
            raise UserError(f"--max_prompt is {arguments.max_prompt}: it must be above 0")
        for key in keys:
            c.data[key] = vars(arguments)[key]
        c.data.max_prompt = arguments.max_prompt or sys.maxsize
        with Scorer(arguments.reward, c.score.workers, c.score.timeout) as judge:
            found = report(
                c, arguments.source, arguments.split, arguments.tokenizer, judge.check_golds
            )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(found, indent=2, ensure_ascii=False))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
