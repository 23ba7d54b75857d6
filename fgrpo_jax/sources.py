"""Where problems come from: files, datasets and generators, each package imported when it is used.

`read` gives all problems of a source as they are; what a run keeps of them is prompts.py's choice.
"""

import codecs
import pathlib
from collections.abc import Iterator
from typing import Any

from fgrpo_jax import UserError, arithmetic, fields, forms, jsons, maze
from fgrpo_jax.forms import Part
from fgrpo_jax.structs import Problem

ARITHMETIC = 16_384  # problems of the embedded task's train split; each kind has its share
MAZES = {"train": 65_536, "test": 1024}  # where a source does not say how many
TASK = {"train": 2048, "test": 512}  # problems of a reasoning_gym task
# reasoning_gym draws problem i by seed + i: nearby seeds would share most problems.
TASK_SEED = {"train": 0, "test": 1_000_000_000}


def read(source: str, split: str, slips: float = 0.0, mapping: str = "") -> list[Problem]:
    """The problems of a source, or of several joined by +, one after the other.

    Args:
        split: "train" or "test", of sources that do not name theirs: the generated ones.
            reasoning_gym's two are drawn by seeds far apart; a small task may repeat itself.
        slips: of arithmetic's worked solutions.
        mapping: data.fields, for all but the generated ones.

    Raises UserError.
    """
    return [
        problem for part in forms.parts(source) for problem in _read(part, split, slips, mapping)
    ]


def _read(part: Part, split: str, slips: float, mapping: str) -> list[Problem]:
    if part.kind == "arithmetic":
        return arithmetic.generate(ARITHMETIC, split, part.rest, slips=slips)
    if part.kind == "maze":
        size, count = forms.maze(part.rest)
        return maze.generate(MAZES[split] if count is None else count, split, size)
    if part.kind == "reasoning_gym":
        return _reasoning_gym(part.rest, split)
    name = f"data file {part.rest}" if part.kind in ("jsonl", "parquet") else part.source
    stem = pathlib.Path(part.rest).stem
    if part.kind in ("tfds", "hf"):
        stem = part.rest.rpartition("/")[0]
    problems = list(fields.problems(rows(part), name, stem, mapping))
    if not problems:
        raise UserError(f"{name} has no problem: it is empty")
    return problems


def rows(part: Part) -> Iterator[dict[str, Any]]:
    """The rows of a file or dataset, as they are. Raises UserError."""
    return {"jsonl": _jsonl, "parquet": _parquet, "tfds": _tfds, "hf": _hf}[part.kind](part.rest)


def _reason(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _file(path: str) -> pathlib.Path:
    """UserError where there is no file, or one of no end: a pipe, a device."""
    file = pathlib.Path(path)
    if not file.exists():
        raise UserError(f"data file {path} does not exist")
    if not file.is_file():
        raise UserError(f"data file {path} cannot be read: it is no regular file")
    return file


def _jsonl(path: str) -> Iterator[dict[str, Any]]:
    number = 0
    try:
        with _file(path).open("rb") as file:
            while line := file.readline(jsons.LIMIT + 1):
                number += 1
                if len(line) > jsons.LIMIT:
                    raise UserError(
                        f"data file {path}, line {number}: longer than {jsons.LIMIT >> 20} MiB"
                    )
                if number == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if line.strip():
                    row = jsons.parse(line)
                    if not isinstance(row, dict):
                        raise ValueError(f"it is of type {type(row).__name__}")
                    yield row
    except OSError as error:
        raise UserError(f"data file {path} cannot be read: {error}") from error
    except ValueError as error:
        reason = getattr(error, "msg", error)  # JSON's own without its place, which is in the line
        raise UserError(f"data file {path}, line {number}: not a JSON object ({reason})") from error


def _parquet(path: str) -> Iterator[dict[str, Any]]:
    import pyarrow
    from pyarrow import parquet

    number = 0
    try:
        with parquet.ParquetFile(_file(path)) as file:
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield row
    except (OSError, ValueError, OverflowError, MemoryError, pyarrow.ArrowException) as error:
        raise UserError(
            f"data file {path} cannot be read after row {number}: {_reason(error)}"
        ) from error


def _tfds(rest: str) -> Iterator[dict[str, Any]]:
    """NAME[:CONFIG]/SPLIT of a known dataset, or FOLDER/SPLIT of one that lies in a folder."""
    try:
        import tensorflow_datasets as tfds
    except ModuleNotFoundError as error:
        raise UserError(f"tfds:{rest} needs a package: pip install tensorflow-datasets") from error

    name, _, split = rest.rpartition("/")
    folder = pathlib.Path(name).expanduser()
    try:
        data: Any
        if (folder / "dataset_info.json").exists():
            data = tfds.builder_from_directory(folder).as_data_source(split=split)  # pyright: ignore
        elif name[0] in "/.~":
            raise UserError(f"tfds:{rest}: {folder} has no dataset_info.json")
        else:
            data = tfds.data_source(name.replace(":", "/", 1), split=split)  # pyright: ignore[reportCallIssue]
        for start in range(0, len(data), 1024):
            for row in data.__getitems__(range(start, min(start + 1024, len(data)))):
                yield _plain(row)
    except UserError:
        raise
    except Exception as error:  # tfds raises its own, and those of what it calls
        raise UserError(f"tfds:{rest} cannot be read: {_reason(error)}") from error


def _hf(rest: str) -> Iterator[dict[str, Any]]:
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UserError(f"hf:{rest} needs the package datasets: pip install datasets") from None
    name, _, split = rest.rpartition("/")
    name, _, config = name.partition(":")
    try:
        rows = datasets.load_dataset(name, config or None, split=split)
    except Exception as error:  # datasets raises its own, and those of what it calls
        raise UserError(f"hf:{rest} cannot be read: {_reason(error)}") from error
    yield from rows


def _reasoning_gym(task: str, split: str) -> list[Problem]:
    """Each problem keeps its entry in `data`: the task's own judge needs it."""
    try:
        import reasoning_gym  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError(
            f"reasoning_gym:{task} needs the extra tasks: pip install 'fgrpo_jax[tasks]' ({error})"
        ) from None
    try:
        entries = reasoning_gym.create_dataset(task, size=TASK[split], seed=TASK_SEED[split])
    except ValueError as error:
        raise UserError(f"reasoning_gym:{task} cannot be drawn: {_reason(error)}") from error
    return [
        Problem(entry["question"], str(entry["answer"] or ""), task, data=dict(entry))
        for entry in entries
    ]


def _plain(value: Any) -> Any:
    """Python's own types for numpy's, text for bytes."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, bytes):
        return value.decode()
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    return [_plain(item) for item in value] if isinstance(value, list) else value
