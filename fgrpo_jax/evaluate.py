"""python -m fgrpo_jax.evaluate --config FILE --benchmarks math500,aime24,... [--checkpoint DIR]

Samples n responses a problem with the config's model, or a checkpoint's, and judges them. Options:
--data-dir FOLDER of the benchmarks' files, else they come from the hub; --samples n (the paper:
1,024); --problems, the first so many; --k, beside powers of two; --system TEXT in place of the
benchmarks' own; --responses FILE.jsonl, or FOLDER of NAME.jsonl, judges responses that others
generated; --method FILE, --config.KEY=VALUE.

The workdir gets NAME.parquet (a row a problem), summary.json, and what is needed to go on where an
evaluation was cut off.
"""

import argparse
import contextlib
import json
import pathlib
import sys
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float
from rich.console import Console
from rich.table import Table

from fgrpo_jax import (
    UserError,
    benchmarks,
    build,
    config,
    distributed,
    jsons,
    layout,
    prompts,
    rewards,
    sharding,
    storage,
    validation,
    weights,
)
from fgrpo_jax import main as command_line
from fgrpo_jax import tokenizer as tokenizers
from fgrpo_jax import workdir as workdirs
from fgrpo_jax.benchmarks import BENCHMARKS
from fgrpo_jax.config import Config
from fgrpo_jax.held_out import FIELDS, Answered, Result, Tallies, judge, sample, summary
from fgrpo_jax.pass_at_k import powers_up_to
from fgrpo_jax.prompts import PromptSet
from fgrpo_jax.rewards import Scorer
from fgrpo_jax.sampler import Stream, make_sampler
from fgrpo_jax.sampling import Sampling
from fgrpo_jax.structs import Problem
from fgrpo_jax.tokenizer import StopStrings, Tokenizer

SHOWN = (1, 8, 64, 256)  # k of the table
CHUNK = 256  # responses that others generated, judged at a time


class Sampler:
    """The policy of a folder, its weights laid out for decoding."""

    def __init__(self, c: Config, folder: pathlib.Path, stack: contextlib.ExitStack):
        self.c, self.tokenizer = c, tokenizers.load(folder)
        self.mesh = sharding.make_mesh(
            *validation.check_mesh(c, jax.device_count(), distributed.hosts())
        )
        self.policy = build.make_policy(c, folder, self.tokenizer)
        stack.enter_context(jax.set_mesh(self.mesh))
        params = weights.load(folder, self.policy, self.mesh, self.policy.dtype)
        unroll = weights.unrolls(c, jax.default_backend())
        self.params = weights.make_decode_params(self.policy, self.mesh, unroll)(params)
        self.stop = StopStrings(self.tokenizer, c.data.stop) if c.data.stop else None

    def text_of(self, tokens: np.ndarray) -> str:
        """A response's text."""
        return self.stop.text(tokens) if self.stop else self.tokenizer.decode(tokens.tolist())

    def stream(self, columns: int, samples: int, sampling: Sampling) -> Stream:
        """make_sampler's, for prompts of so many columns."""
        stop_ids, stop = self.tokenizer.stop_ids, self.stop
        settings = layout.settings_of(self.c, self.policy, samples, sampling, stop_ids, columns)
        return make_sampler(self.policy, settings, stop and stop.stopped)

    def __call__(
        self,
        name: str,
        problems: list[Problem],
        system: str | None,
        scorer: Scorer,
        tallies: Tallies,
    ) -> Float[np.ndarray, "P 4"]:
        """held_out.FIELDS of a benchmark's problems; system: in place of its own message."""
        c, benchmark = self.c, BENCHMARKS[name]
        tokenizer = self.tokenizer.with_chat_template(c.data.chat_template)
        messages = [problem.text for problem in problems]  # data.template is training's
        system = benchmark.system if system is None else system
        ids = tuple(prompts.token_ids(tokenizer, messages, system, benchmark.thinking))
        asked = PromptSet(tuple(problems), ids, max(map(len, ids)), {})
        sampling = Sampling(c.eval.temperature, c.eval.top_k, c.eval.top_p, c.eval.min_p)
        return sample(
            self.stream(asked.width, tallies.samples, sampling),
            self.text_of,
            scorer,
            asked,
            len(problems),
            sharding.shards(*sharding.ROWS),
            tallies,
            self.params,
            jax.random.fold_in(jax.random.key(c.seed), zlib.crc32(name.encode())),
        )


def checkpoint_folder(path: str, flag: str = "--checkpoint") -> pathlib.Path:
    """The Hugging Face folder that is meant: itself, or what a run's workdir ended with."""
    folder = pathlib.Path(path)
    if not (folder / "config.json").is_file() or not (folder / "policy").is_dir():
        return weights.resolve(path, flag)
    return folder / "policy"


def mark(folder: pathlib.Path, source: str, system: str | None) -> str:
    """What tells the samples of one evaluation from another's in a workdir: weights, as their
    files' sizes and times tell, the benchmark's file, and the system message."""
    files = [(path.name, path.stat()) for path in sorted(folder.glob("*.safetensors"))]
    weighed = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in files]
    return f"{zlib.crc32(json.dumps([str(folder), weighed, source, system]).encode()):08x}"


def given(path: pathlib.Path, problems: int, samples: int | None) -> tuple[list[Any], int]:
    """(records, n) of a JSON Lines file of {"problem": place, "response": text}, and of "tokens"
    and "finished" where they are known; UserError where it has not n of each problem."""
    if not path.is_file():
        raise UserError(f"there are no responses in {path}: it does not exist")
    records, count = [], np.zeros(problems, int)
    for number, line in enumerate(jsons.read_lines(path), 1):
        try:
            record = jsons.parse(line)
            problem, text = record["problem"], record["response"]
            if type(problem) is not int or not isinstance(text, str):
                raise TypeError
        except (ValueError, KeyError, TypeError):
            raise UserError(
                f'{path}, line {number}: it must be {{"problem": PLACE, "response": TEXT}}'
            ) from None
        if not 0 <= problem < problems:
            raise UserError(f"{path}, line {number}: there is no problem {problem}, of {problems}")
        count[problem] += 1
        records.append(record)
    n = samples or max(1, int(count[0]))
    for place in np.flatnonzero(count != n):
        raise UserError(
            f"{path} has {count[place]} responses to problem {place}, and must have {n} to each of "
            f"0 to {problems - 1}"
        )
    return records, n


def batches_of(records: list[Any], tokenizer: Tokenizer) -> Iterator[list[Answered]]:
    """The responses of `given`; the tokenizer counts those of unknown length."""
    for start in range(0, len(records), CHUNK):
        some = records[start : start + CHUNK]
        lacking = [r["response"] for r in some if "tokens" not in r]
        lengths = iter(map(len, tokenizer.encode(lacking)))
        yield [
            Answered(
                record["problem"],
                record["response"],
                int(record["tokens"]) if "tokens" in record else next(lengths),
                bool(record.get("finished", True)),
            )
            for record in some
        ]


def write(
    path: pathlib.Path, problems: list[Problem], table: Float[np.ndarray, "P 4"], samples: int
) -> None:
    """A row a problem: its place, kind, gold, n, and held_out.FIELDS."""
    import pyarrow
    from pyarrow import parquet

    columns: dict[str, Any] = {
        "problem": range(len(problems)),
        "kind": [problem.kind for problem in problems],
        "text": [problem.text for problem in problems],
        "gold": [problem.answer for problem in problems],
        "samples": [samples] * len(problems),
    }
    for name, column in zip(FIELDS[:3], table.T, strict=False):
        columns[name] = column.astype(np.int64)
    columns[FIELDS[3]] = [None if np.isnan(x) else x for x in table[:, 3].tolist()]
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table(columns), sink)
    storage.write(path, sink.getvalue().to_pybytes())


def report(results: dict[str, Result], samples: dict[str, int]) -> Table:
    """Percentages by benchmark, and their mean."""
    columns = [f"pass@{k}" for k in SHOWN if all(k <= n for n in samples.values())]
    out = Table("benchmark", "n", *columns, "maj@n", "tokens", "cut off")
    percent = lambda x: "" if x is None else f"{100 * x:.1f}"
    for name, result in results.items():
        cells = [percent(result[column]) for column in columns]
        majority, tokens = result.get(f"maj@{samples[name]}"), result["response_tokens"]
        row = [str(samples[name]), *cells, percent(majority), f"{tokens:,.0f}"]
        out.add_row(name, *row, percent(result["truncated"]))
    if len(results) > 1:
        means = [percent(np.mean([r[column] for r in results.values()])) for column in columns]
        out.add_row("mean", "", *means, "", "", "")
    return out


def evaluate(
    c: Config, workdir: pathlib.Path, console: Console, arguments: argparse.Namespace
) -> None:
    """Evaluates what the workdir lacks. Raises UserError."""
    asked = benchmarks.find(arguments.benchmarks)
    if arguments.responses and len(asked) > 1 and pathlib.Path(arguments.responses).is_file():
        raise UserError(
            "--responses is one file: name one benchmark, or give a folder of NAME.jsonl"
        )
    n = arguments.samples or c.eval.samples
    if not arguments.responses and max(arguments.k, default=1) > n:
        raise UserError(f"--k has {max(arguments.k)}, and there are {n} samples a problem")
    folder = weights.resolve(c.model.path)
    sets = {name: benchmarks.load(name, arguments.data_dir) for name in asked}
    for name, problems in sets.items():
        sets[name] = problems[: arguments.problems] if arguments.problems else problems
    results: dict[str, Result] = {}
    samples: dict[str, int] = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(workdirs.locked(workdir))
        workdirs.check(c, workdir)
        workdirs.claim(c, workdir)
        sampler = None if arguments.responses else Sampler(c, folder, stack)
        for name, problems in sets.items():
            scorer = rewards.Scorer(asked[name].reward, c.score.workers, c.score.timeout)
            with scorer:
                if sampler is None:
                    path = pathlib.Path(arguments.responses)
                    path = path / f"{name}.jsonl" if path.is_dir() else path
                    records, n = given(path, len(problems), arguments.samples)
                    tallies = Tallies(workdir / f"{name}.given.{distributed.host()}.jsonl", n)
                    tallies.done.clear()  # judged anew: the file may have changed
                    judge(batches_of(records, tokenizers.load(folder)), problems, scorer, tallies)
                    table = tallies.table(len(problems))
                else:
                    n = arguments.samples or c.eval.samples
                    source = benchmarks.source_of(name, arguments.data_dir)
                    of = f"{name}.{mark(folder, source, arguments.system)}"
                    tallies = Tallies(workdir / f"{of}.{distributed.host()}.jsonl", n)
                    table = sampler(name, problems, arguments.system, scorer, tallies)
            ks = sorted({*powers_up_to(n), *arguments.k})
            if ks[-1] > n:
                raise UserError(f"--k has {ks[-1]}, and there are {n} samples a problem")
            results[name], samples[name] = summary(table, problems, n, ks), n
            if distributed.is_main():
                write(workdir / f"{name}.parquet", problems, table, n)
                storage.write(workdir / "summary.json", json.dumps(results, indent=1) + "\n")
                line = f"{name}: {len(problems)} problems, pass@1 {results[name]['pass@1']:.1%}"
                console.print(line, highlight=False)
    if distributed.is_main():
        console.print(report(results, samples))
        console.print(f"by problem: {workdir}/NAME.parquet", highlight=False)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fgrpo_jax.evaluate", allow_abbrev=False,
        description="pass@k, maj@n and lengths on benchmarks.",
    )  # fmt: skip
    parser.add_argument("--config", required=True, help="Python file with get_config()")
    parser.add_argument("--method", action="append", default=[], help="as of fgrpo_jax.main")
    parser.add_argument("--benchmarks", required=True, help=", ".join(BENCHMARKS))
    parser.add_argument("--checkpoint", help="Hugging Face folder, or a run's workdir")
    parser.add_argument("--data-dir", default="", help="folder of the benchmarks' files")
    parser.add_argument("--samples", type=int, help="n, a problem; default eval.samples")
    parser.add_argument("--problems", type=int, help="the first so many; default all")
    parser.add_argument("--k", default="", help="of pass@k, beside powers of two")
    parser.add_argument("--system", help="system message; default the benchmark's own")
    parser.add_argument("--responses", help="JSON Lines that others generated, or their folder")
    parser.add_argument("--workdir", help="default runs/evaluate_<name of the config>")
    arguments, rest = parser.parse_known_args(argv)

    def work() -> None:
        overrides = [*command_line.overrides(rest), "lora.rank=0"]  # a folder is whole
        if arguments.checkpoint:
            overrides.append(f"model.path={checkpoint_folder(arguments.checkpoint)}")
        c = config.load(arguments.config, overrides, arguments.method)
        words = arguments.k.split(",") if arguments.k else []
        if not all(word.isdigit() and int(word) for word in words):
            raise UserError(f"--k is {arguments.k!r}: give whole numbers joined by commas")
        arguments.k = list(map(int, words))
        for name in ("samples", "problems"):
            if vars(arguments)[name] is not None and vars(arguments)[name] < 1:
                raise UserError(f"--{name} must be above 0")
        folder = arguments.workdir or f"runs/evaluate_{pathlib.Path(arguments.config).stem}"
        distributed.start()
        console = Console(highlight=False, soft_wrap=True)
        evaluate(c, pathlib.Path(folder), console, arguments)

    return command_line.exit_code(work)


if __name__ == "__main__":
    distributed.leave(main(sys.argv[1:]))
