"""The benchmarks of python -m fgrpo_jax.evaluate: where each is, how it is asked and judged.

A chat prompt of one user message; BOXED is its system message where a benchmark has it, else the
chat template's own default (Qwen2.5: "You are a helpful assistant.", Llama: its date). GPQA's four
options are shuffled by the problem's place, so that every run sees the same order.
"""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

from fgrpo_jax import UserError, forms, jsons, sources
from fgrpo_jax.answers import BOXED
from fgrpo_jax.structs import Problem

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """A set of problems."""

    hub: str  # the source that has it, as data.source
    files: tuple[str, ...] = ()  # names in --data-dir, beside the benchmark's own
    reward: str = "math"
    system: str = BOXED  # empty: the chat template's own default
    thinking: bool = True  # of chat templates that can turn it off, as Qwen3's
    problem: Callable[[Row, int], Problem] | None = None  # of a row and its place; None: as
    # fields.py guesses


def _ifeval(row: Row, place: int) -> Problem:
    data = {name: row[name] for name in ("instruction_id_list", "kwargs")}
    return Problem(row["prompt"], "", "ifeval", data=data)


def _gpqa(row: Row, place: int) -> Problem:
    options = [row["Correct Answer"], *(row[f"Incorrect Answer {i}"] for i in (1, 2, 3))]
    order = np.random.RandomState(place).permutation(4)  # whose numbers no version may change
    lines = [f"{letter}. {options[i].strip()}" for letter, i in zip("ABCD", order, strict=True)]
    text = "\n".join([row["Question"].strip(), "", *lines, "", "Answer with the option's letter."])
    kind = str(row.get("High-level domain") or "gpqa")
    return Problem(text, "ABCD"[list(order).index(0)], kind)


def _synlogic(row: Row, place: int) -> Problem:
    prompt = row["prompt"]
    text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    kind = row["data_source"].rpartition("/")[2]
    data = {"data_source": kind, "game_data_str": row["extra_info"]["game_data_str"]}
    return Problem(text, "", kind, data=data)


BENCHMARKS = {
    "math500": Benchmark("hf:HuggingFaceH4/MATH-500/test"),
    "aime24": Benchmark("hf:HuggingFaceH4/aime_2024/train"),
    "aime25": Benchmark("hf:math-ai/aime25/test"),
    "amc23": Benchmark("hf:math-ai/amc23/test"),
    "minerva": Benchmark("hf:math-ai/minervamath/test", ("minerva_math",)),
    "olympiad": Benchmark("hf:math-ai/olympiadbench/test", ("olympiadbench",)),
    "gsm8k": Benchmark("hf:openai/gsm8k:main/test", ("gsm8k_test",), reward="gsm8k"),
    "ifeval": Benchmark(
        "hf:google/IFEval/train", reward="ifeval", system="", thinking=False, problem=_ifeval
    ),
    "ifeval_loose": Benchmark(
        "hf:google/IFEval/train", ("ifeval",), "ifeval_loose", "", thinking=False, problem=_ifeval
    ),
    "gpqa": Benchmark(
        "hf:Idavidrein/gpqa:gpqa_diamond/train", ("gpqa_diamond",), "multiple_choice", problem=_gpqa
    ),
    "synlogic": Benchmark(
        "hf:MiniMaxAI/SynLogic:easy/validation", reward="synlogic", system="", problem=_synlogic
    ),
}


def find(names: str) -> dict[str, Benchmark]:
    """Those that are named, joined by commas; UserError where one is unknown."""
    found = {}
    for name in names.split(","):
        if name not in BENCHMARKS:
            raise UserError(f"there is no benchmark {name!r}: it is one of {', '.join(BENCHMARKS)}")
        found[name] = BENCHMARKS[name]
    return found


def source_of(name: str, data_dir: str = "") -> str:
    """Where a benchmark is read: its file or TFDS dataset in the folder, or the hub where none is
    given. UserError where the folder has neither."""
    if not data_dir:
        return BENCHMARKS[name].hub
    stems = (name, *BENCHMARKS[name].files)
    for stem in stems:
        for kind in ("jsonl", "parquet"):
            path = pathlib.Path(data_dir) / f"{stem}.{kind}"
            if path.is_file():
                return f"{kind}:{path}"
        for info in sorted(pathlib.Path(data_dir).glob(f"{stem}/*/dataset_info.json")):
            splits = {split["name"] for split in jsons.read_json(info).get("splits", [])}
            return f"tfds:{info.parent}/{'test' if 'test' in splits else 'train'}"
    raise UserError(
        f"{data_dir} has no file of {name}: it must be called {' or '.join(stems)}, and end in "
        ".jsonl or .parquet, or be a folder that rlvr_dataset wrote"
    )


def load(name: str, data_dir: str = "") -> list[Problem]:
    """The problems of a benchmark, in the order of its file. Raises UserError."""
    source, problem = source_of(name, data_dir), BENCHMARKS[name].problem
    if problem is None:
        return sources.read(source, "test")
    (part,) = forms.parts(source)
    try:
        found = [problem(row, place) for place, row in enumerate(sources.rows(part))]
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise UserError(f"{source} has not the fields of {name}: it lacks {error}") from error
    if not found:
        raise UserError(f"{source} has no problem: it is empty")
    return found
