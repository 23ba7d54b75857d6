"""python -m fgrpo_jax.experiments.rare_nll --config FILE --trained DIR [--trained DIR ...]

What training did to rare right answers (the paper's appendix M.2): of --samples responses of the
config's model to --prompts training problems each, the right ones; of those the --share with the
highest negative log-likelihood a token under that model; and by how much it is higher under each
trained one. The paper: 256 prompts, 800 samples, a share of 0.01; Qwen2.5-7B at N = 8: +0.68 nats
with GRPO, +0.46 with F-GRPO.

The workdir gets right.MARK.jsonl, whose prompts are not sampled again, and rare_nll.json.
"""

import argparse
import collections
import contextlib
import json
import math
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float
from rich.console import Console
from rich.table import Column, Table

from fgrpo_jax import (
    UserError,
    config,
    distributed,
    evaluate,
    jsons,
    prompts,
    rewards,
    sharding,
    storage,
    weights,
)
from fgrpo_jax import main as command_line
from fgrpo_jax import tokenizer as tokenizers
from fgrpo_jax import workdir as workdirs
from fgrpo_jax.answers import Score
from fgrpo_jax.config import Config
from fgrpo_jax.prompts import PromptSet
from fgrpo_jax.reference import make_reference
from fgrpo_jax.sampling import Sampling
from fgrpo_jax.structs import Response, Rollouts

DRAWS = 2000  # of the bootstrap
Right = dict[str, Any]  # problem: its place; tokens; nll: nats a token under the sampler


def read(path: pathlib.Path, samples: int) -> tuple[list[Right], set[int]]:
    """The right responses of the prompts that are done, and those prompts; what was cut off while
    it was written is left out of the file."""
    found: dict[int, list[Right]] = collections.defaultdict(list)
    done: set[int] = set()
    for line in jsons.read_lines(path):
        try:
            record = jsons.parse(line)
            if "done" in record and record["done"] == samples:
                done.add(record["problem"])
            elif "tokens" in record and record["problem"] not in done:
                found[record["problem"]].append(record)
        except (ValueError, KeyError, TypeError):
            break
    kept = {problem: found[problem] for problem in sorted(done)}
    lines = [
        json.dumps(record) + "\n"
        for problem, some in kept.items()
        for record in (*some, {"problem": problem, "done": samples})
    ]
    storage.write(path, "".join(lines))
    return [record for some in kept.values() for record in some], done


def collect(
    sampler: evaluate.Sampler,
    asked: PromptSet,
    count: int,
    samples: int,
    scorer: rewards.Scorer,
    path: pathlib.Path,
) -> list[Right]:
    """The right responses to the first `count` problems, so many samples each."""
    found, done = read(path, samples)
    found = [right for right in found if right["problem"] < count]
    left = [place for place in range(count) if place not in done]
    size = len(left) + -len(left) % sharding.shards(*sharding.ROWS)
    places = np.array(left + [-1] * (size - len(left)), np.int32)
    if not left:
        return found
    c = sampler.c
    sampling = Sampling(c.rollout.temperature, c.rollout.top_k, c.rollout.top_p, c.rollout.min_p)
    stream = sampler.stream(asked.width, samples, sampling)
    batch = asked.batch(places, np.maximum(places, 0))
    pending: dict[int, list[Right]] = collections.defaultdict(list)
    judged: collections.Counter[int] = collections.Counter()
    for some in stream(sampler.params, batch, jax.random.key(c.seed)):
        for place, response, score in _judged(some, left, samples, asked, sampler, scorer):
            judged[place] += 1
            if score.correct:
                nll = -float(np.mean(response.logp, dtype=np.float64))
                tokens = response.tokens.tolist()
                pending[place].append({"problem": place, "nll": nll, "tokens": tokens})
            if judged[place] == samples:
                mine = pending.pop(place, [])
                lines = [json.dumps(record) + "\n" for record in mine]
                done_line = json.dumps({"problem": place, "done": samples}) + "\n"
                storage.append(path, "".join([*lines, done_line]))
                found += mine
    return found


def _judged(
    some: list[Response],
    left: list[int],
    samples: int,
    asked: PromptSet,
    sampler: evaluate.Sampler,
    scorer: rewards.Scorer,
) -> Iterator[tuple[int, Response, Score]]:
    places = [left[response.row // samples] for response in some]
    texts = [sampler.text_of(response.tokens) for response in some]
    finished = [response.finished for response in some]
    scores = scorer.score([asked.problems[place] for place in places], texts, finished)
    yield from zip(places, some, scores, strict=True)


def rarest(found: list[Right], share: float) -> list[Right]:
    """The share of highest negative log-likelihood, at least one; ties by problem and tokens."""
    order = sorted(found, key=lambda right: (-right["nll"], right["problem"], right["tokens"]))
    return order[: max(1, round(share * len(order)))]


def likelihoods(
    c: Config, folder: pathlib.Path, sampler: evaluate.Sampler, asked: PromptSet, rare: list[Right]
) -> Float[np.ndarray, " R"]:
    """Nats a token of the rare responses under a folder's model."""
    weights.check(folder, sampler.policy)
    params = weights.load(folder, sampler.policy, sampler.mesh, sampler.policy.dtype)
    shards = sharding.shards(*sharding.ROWS)
    rows = max(shards, c.learn.microbatch - c.learn.microbatch % shards)
    logprobs = make_reference(
        sampler.policy, params, c.rollout.temperature, c.learn.logit_chunk, rows, sampler.mesh
    )
    columns = max(len(right["tokens"]) for right in rare)
    out: list[float] = []
    for start in range(0, len(rare), rows):
        some = rare[start : start + rows]
        filled = some + [some[0]] * (rows - len(some))  # one compiled shape
        tokens_BT = np.zeros((rows, columns), np.int32)
        mask_BT = np.zeros((rows, columns), bool)
        for row, right in enumerate(filled):
            tokens_BT[row, : len(right["tokens"])] = right["tokens"]
            mask_BT[row, : len(right["tokens"])] = True
        places = np.array([right["problem"] for right in filled], np.int32)
        one = np.ones((rows, 1), np.float32)
        rollouts = Rollouts(
            asked.batch(places, places), tokens_BT, mask_BT, np.zeros((rows, columns), np.float32),
            np.ones(rows, bool), one, one, one > 0, ("",) * rows, ("right",) * rows,
        )  # fmt: skip
        logp_BT = logprobs(rollouts).ref_logp_BT
        assert logp_BT is not None
        nll_B = -np.where(mask_BT, logp_BT, 0).sum(axis=1, dtype=np.float64) / mask_BT.sum(axis=1)
        out += nll_B[: len(some)].tolist()
    return np.array(out)


def interval(change_R: Float[np.ndarray, " R"], problem_R: np.ndarray) -> tuple[float, float]:
    """95 % of the mean; problems are drawn again, with all their responses."""
    draw = np.random.default_rng(0)
    of_P = [change_R[problem_R == problem] for problem in np.unique(problem_R)]
    sum_P, size_P = np.array([x.sum() for x in of_P]), np.array([len(x) for x in of_P])
    drawn = draw.integers(0, len(of_P), (DRAWS, len(of_P)))
    means = sum_P[drawn].sum(axis=1) / size_P[drawn].sum(axis=1)
    low, high = np.percentile(means, (2.5, 97.5))
    return float(low), float(high)


def study(c: Config, workdir: pathlib.Path, console: Console, arguments: Any) -> None:
    """Raises UserError."""
    if distributed.hosts() > 1:
        raise UserError(f"rare_nll is for one process, and there are {distributed.hosts()}")
    folder = weights.resolve(c.model.path)
    trained = {name: evaluate.checkpoint_folder(name, "--trained") for name in arguments.trained}
    with contextlib.ExitStack() as stack:
        stack.enter_context(workdirs.locked(workdir))
        workdirs.check(c, workdir)
        workdirs.claim(c, workdir)
        scorer = stack.enter_context(rewards.Scorer(c.reward, c.score.workers, c.score.timeout))
        tokenizer = tokenizers.load(folder)
        asked = prompts.load(c, c.data.source, "train", tokenizer, scorer.check_golds)
        sampler = evaluate.Sampler(c, folder, stack)
        count = min(arguments.prompts, len(asked.problems))
        path = workdir / f"right.{evaluate.mark(folder, c.data.source, c.data.system)}.jsonl"
        found = collect(sampler, asked, count, arguments.samples, scorer, path)
        if not found:
            raise UserError(f"none of {count * arguments.samples:,} responses is right")
        rare = rarest(found, arguments.share)
        before_R = likelihoods(c, folder, sampler, asked, rare)
        problem_R = np.array([right["problem"] for right in rare])
        result = {
            "prompts": count,
            "samples": arguments.samples,
            "right": len(found),
            "rare": len(rare),
            "base": float(before_R.mean()),
            "trained": {},
        }
        out = Table(Column("model", overflow="fold"), "nats a token", "change", "95 %")
        out.add_row(c.model.path, f"{before_R.mean():.3f}", "", "")
        for name, place in trained.items():
            change_R = likelihoods(c, place, sampler, asked, rare) - before_R
            mean, (low, high) = float(change_R.mean()), interval(change_R, problem_R)
            result["trained"][name] = {"change": mean, "low": low, "high": high}
            cells = f"{before_R.mean() + mean:.3f}", f"{mean:+.3f}", f"{low:+.3f} to {high:+.3f}"
            out.add_row(name, *cells)
        storage.write(workdir / "rare_nll.json", json.dumps(result, indent=1) + "\n")
    console.print(
        f"{len(rare):,} rare of {len(found):,} right ones of {count * arguments.samples:,}",
        highlight=False,
    )
    console.print(out)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fgrpo_jax.experiments.rare_nll", allow_abbrev=False,
        description="Change of rare right responses' negative log-likelihood.",
    )  # fmt: skip
    parser.add_argument("--config", required=True, help="Python file with get_config()")
    parser.add_argument("--method", action="append", default=[], help="as of fgrpo_jax.main")
    parser.add_argument(
        "--trained", action="append", required=True, help="Hugging Face folder, or a run's workdir"
    )
    parser.add_argument("--prompts", type=int, default=256, help="of the training source")
    parser.add_argument("--samples", type=int, default=800, help="a prompt")
    parser.add_argument("--share", type=float, default=0.01, help="of the right ones that is rare")
    parser.add_argument("--workdir", help="default runs/rare_nll_<name of the config>")
    arguments, rest = parser.parse_known_args(argv)

    def work() -> None:
        c = config.load(
            arguments.config, [*command_line.overrides(rest), "lora.rank=0"], arguments.method
        )
        if arguments.prompts < 1 or arguments.samples < 1:
            raise UserError("--prompts and --samples must be above 0")
        if not (math.isfinite(arguments.share) and 0 < arguments.share <= 1):
            raise UserError("--share must be above 0 and at most 1")
        folder = arguments.workdir or f"runs/rare_nll_{pathlib.Path(arguments.config).stem}"
        study(c, pathlib.Path(folder), Console(highlight=False, soft_wrap=True), arguments)

    return command_line.exit_code(work)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
