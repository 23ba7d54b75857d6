"""A TFDS builder that writes any source once as ArrayRecord: random access, alike on every host.

python -m fgrpo_jax.rlvr_dataset SOURCE --name NAME --out FOLDER [--test SOURCE] [--fields MAPPING]
prints the source that reads it back, tfds:FOLDER/NAME/VERSION/SPLIT. No TensorFlow is needed. With
--clean it leaves out what a run would, so that all who train on it see the same problems: golds
that --reward cannot judge, duplicates, all copies of those that disagree, and with --tokenizer and
--max_prompt prompts (with --system) of more tokens.
"""

import argparse
import contextlib
import json
import pathlib
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow_datasets as tfds

from fgrpo_jax import UserError, config, fields, forms, prompts, sources
from fgrpo_jax import tokenizer as tokenizers
from fgrpo_jax.rewards import Scorer
from fgrpo_jax.structs import Problem

Row = dict[str, str]  # a Problem's fields; data is JSON, or empty


class RlvrDataset(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Problems with verifiable answers."""

    VERSION = tfds.core.Version("1.0.0")

    def __init__(self, *, name: str, rows: dict[str, list[Row]], **options: Any):
        """
        Args:
            name: of the dataset.
            rows: by split.
            options: of tfds.core.DatasetBuilder, as data_dir.
        """
        self.name = name  # pyright: ignore[reportAttributeAccessIssue]  # of the class's usually
        self.rows = rows
        super().__init__(file_format="array_record", **options)

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description="Problems with verifiable answers, as fgrpo_jax.structs.Problem has them.",
            features=tfds.features.FeaturesDict(
                {name: tfds.features.Text() for name in sorted(fields.OWN)}
            ),
            disable_shuffling=True,  # a run shuffles anew each epoch
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator[tuple[int, Row]]]:
        return {split: self._generate_examples(rows) for split, rows in self.rows.items()}

    def _generate_examples(self, rows: list[Row]) -> Iterator[tuple[int, Row]]:
        return iter(enumerate(rows))


def write(problems: dict[str, list[Problem]], name: str, out: pathlib.Path) -> dict[str, str]:
    """Writes the problems of each split to OUT/NAME/VERSION; the source of each split."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise UserError(f"--name is {name!r}: it must be lower-case letters, digits and _")
    if (out / name).exists():
        raise UserError(f"{out / name} exists: remove it, or give another --name")
    rows = {split: list(map(_row, found)) for split, found in problems.items()}
    builder = RlvrDataset(name=name, rows=rows, data_dir=str(out))
    with tempfile.TemporaryDirectory() as downloads, contextlib.redirect_stdout(sys.stderr):
        builder.download_and_prepare(download_dir=downloads)
    return {split: f"tfds:{builder.data_dir}/{split}" for split in problems}


def _row(problem: Problem) -> Row:
    try:
        data = "" if problem.data is None else json.dumps(problem.data)
    except (TypeError, ValueError) as error:
        raise UserError(f"the data of {problem.text!r} is not JSON: {error}") from error
    return {
        "text": problem.text,
        "answer": problem.answer,
        "kind": problem.kind,
        "worked": problem.worked,
        "data": data,
    }


def clean(
    source: str, split: str, arguments: argparse.Namespace
) -> tuple[list[Problem], dict[str, int]]:
    """The problems that a run with these settings keeps, and how many it drops, by reason."""
    c = config.default()
    c.data.fields, c.data.system = arguments.fields, arguments.system
    c.data.chat_template, c.data.max_prompt = arguments.chat_template, arguments.max_prompt
    with Scorer(arguments.reward, c.score.workers, c.score.timeout) as scorer:
        if arguments.tokenizer is None:
            problems, _, dropped, _ = prompts.choose(c, source, split, scorer.check_golds)
            return problems, dropped
        tokenizer = tokenizers.load(arguments.tokenizer)
        loaded = prompts.load(c, source, split, tokenizer, scorer.check_golds)
    return list(loaded.problems), loaded.dropped


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m fgrpo_jax.rlvr_dataset", allow_abbrev=False)
    parser.add_argument("source", help="as data.source, of the split train")
    parser.add_argument("--test", help="source of a split test")
    parser.add_argument("--name", required=True, help="of the dataset")
    parser.add_argument("--out", required=True, type=pathlib.Path, help="folder of datasets")
    parser.add_argument("--fields", default="", help="as data.fields")
    parser.add_argument("--clean", action="store_true", help="leave out what a run would")
    parser.add_argument("--reward", default="math", help="whose golds are checked")
    parser.add_argument("--tokenizer", type=pathlib.Path, help="Hugging Face folder")
    parser.add_argument("--max_prompt", type=int, default=1024, help="tokens, by the tokenizer")
    parser.add_argument("--system", default="", help="as data.system")
    parser.add_argument("--chat_template", default="", help="as data.chat_template")
    arguments = parser.parse_args(argv)
    tfds.disable_progress_bar()
    try:
        problems, dropped = {}, {}
        if arguments.tokenizer and not arguments.clean:
            raise UserError("--tokenizer counts tokens of what is left out: give --clean too")
        for split, source in (("train", arguments.source), ("test", arguments.test)):
            if source is None:
                continue
            if any(part.weight is not None for part in forms.parts(source)):
                raise UserError(f"{source}: weights are a run's business, give them in data.source")
            if arguments.clean:
                problems[split], dropped[split] = clean(source, split, arguments)
            else:
                problems[split] = sources.read(source, split, mapping=arguments.fields)
        written = write(problems, arguments.name, arguments.out)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    rows = {split: len(found) for split, found in problems.items()}
    told = {"dropped": dropped} if arguments.clean else {}
    print(json.dumps({"rows": rows, **told, "sources": written}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
