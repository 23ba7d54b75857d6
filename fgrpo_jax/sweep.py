"""python -m fgrpo_jax.sweep --config FILE KEY=VALUE,VALUE [KEY=VALUE,VALUE ...] [--method FILE]

Prints the command of each run, one a line: all combinations of the keys' values, each in a folder
of its own. All are checked before the first is printed. What all runs have alike is given as to
fgrpo_jax.main, --config.KEY=VALUE; a value with commas of its own must be a JSON list.

    python -m fgrpo_jax.sweep --config configs/qwen7b_grpo.py algo.group_size=2,4,8,16,32
"""

import argparse
import itertools
import pathlib
import re
import shlex
import sys
from collections.abc import Sequence

from fgrpo_jax import UserError, config
from fgrpo_jax import main as command_line


def choices(settings: Sequence[str]) -> list[list[str]]:
    """The overrides KEY=VALUE of each KEY=VALUE,VALUE; UserError where one is none."""
    found: dict[str, list[str]] = {}
    for setting in settings:
        key, equals, values = setting.partition("=")
        if setting.startswith("-"):
            raise UserError(
                f"unknown flag {setting}: what differs is given as KEY=VALUE,VALUE, what all runs "
                "have alike as --config.KEY=VALUE"
            )
        if not equals:
            raise UserError(f"{key} has no values: write {key}=VALUE,VALUE")
        if key in found:
            raise UserError(f"{key} is given twice: write {key}=VALUE,VALUE once")
        found[key] = [f"{key}={value}" for value in re.split(r",(?![^\[]*\])", values)]
    if not found:
        raise UserError("nothing differs between the runs: give KEY=VALUE,VALUE")
    return list(found.values())


def commands(
    path: str, methods: Sequence[str], settings: Sequence[str], workdir: str = ""
) -> list[str]:
    """One a run. Raises UserError where a config is not valid, or two are of the same run."""
    alike = [setting for setting in settings if setting.startswith("--config.")]
    differ = choices([setting for setting in settings if setting not in alike])
    names = [pathlib.Path(file).stem for file in (path, *methods)]
    parent = pathlib.Path(workdir or f"runs/sweep_{'_'.join(names)}")
    lines: list[str] = []
    seen: dict[str, str] = {}  # what tells a run from others -> its overrides
    for chosen in itertools.product(*differ):
        name = "_".join(chosen)
        c = config.load(path, [*command_line.overrides(alike), *chosen], methods)
        folder = parent / re.sub(r"[^\w.+=-]", "-", name)
        for mark in (str(config.keys(c)), str(folder)):
            if mark in seen:
                raise UserError(f"{seen[mark]} and {name} are the same run, or of the same folder")
            seen[mark] = name
        flags = ["--config", path, *(x for method in methods for x in ("--method", method))]
        flags += ["--workdir", str(folder), *alike, *(f"--config.{x}" for x in chosen)]
        lines.append(shlex.join(["python", "-m", "fgrpo_jax.main", *flags]))
    return lines


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fgrpo_jax.sweep", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--config", required=True, help="Python file with get_config()")
    parser.add_argument("--method", action="append", default=[], help="Python file with apply(c)")
    parser.add_argument("--workdir", default="", help="of all; default runs/sweep_<names>")
    arguments, rest = parser.parse_known_args(argv)

    def work() -> None:
        lines = commands(arguments.config, arguments.method, rest, arguments.workdir)
        print("\n".join(lines))

    return command_line.exit_code(work)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
