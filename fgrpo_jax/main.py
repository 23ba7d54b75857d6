"""python -m fgrpo_jax.main --config FILE [--method FILE] [--workdir DIR] [--config.KEY=VALUE]"""

import argparse
import faulthandler
import os
import pathlib
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence

from rich.console import Console

from fgrpo_jax import Preempted, StorageError, UserError, config
from fgrpo_jax import workdir as workdirs
from fgrpo_jax.config import Config

Job = Callable[[Config, pathlib.Path, Console], object]


def overrides(flags: Sequence[str]) -> list[str]:
    """KEY=VALUE of each --config.KEY=VALUE; UserError for another flag."""
    for flag in flags:
        if not flag.startswith("--config."):
            raise UserError(f"unknown flag {flag}: settings are given as --config.KEY=VALUE")
    return [flag.removeprefix("--config.") for flag in flags]


def run(
    job: Job,
    description: str,
    argv: Sequence[str],
    load: Callable[..., Config] = config.load,
) -> int:
    """Reads the flags and runs the job; its `exit_code`. `load` is of the config's kind."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    parser.add_argument("--config", required=True, help="Python file with get_config()")
    parser.add_argument(
        "--method", action="append", default=[], help="Python file with apply(c); may be repeated"
    )
    parser.add_argument(
        "--workdir", help="where the run lives; default runs/<names of config and methods>"
    )
    arguments, rest = parser.parse_known_args(argv)
    console = Console(highlight=False, soft_wrap=True)

    def work() -> None:
        c = load(arguments.config, overrides(rest), arguments.method)
        name = "_".join(pathlib.Path(file).stem for file in (arguments.config, *arguments.method))
        job(c, pathlib.Path(arguments.workdir or f"runs/{name}"), console)

    return exit_code(work)


def exit_code(work: Callable[[], int | None]) -> int:
    """What it returns, 0 for None; 2 where it is a mistake of the user's, 74 where a disk or bucket
    refused, 75 where it was asked to stop, and saved, 130 where it was interrupted: said on
    stderr."""
    try:
        return work() or 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except StorageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 74  # EX_IOERR of sysexits.h
    except Preempted as error:
        print(error, file=sys.stderr)
        return 75  # EX_TEMPFAIL of sysexits.h
    except KeyboardInterrupt:
        print("interrupted: run the same command again to go on", file=sys.stderr)
        return 130


def _train(c: Config, workdir: pathlib.Path, console: Console) -> object:
    from fgrpo_jax import distributed, train  # after the config is known to be good

    distributed.start()
    distributed.agree(workdirs.identity(c))
    return train.train(c, workdir, console)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # silences a warning upon fork
    warnings.filterwarnings("ignore", module="orbax")
    faulthandler.enable()  # stacks, where JAX aborts the process
    try:
        code = run(_train, "RL with verifiable rewards and the focal weight.", sys.argv[1:])
    except Exception:
        traceback.print_exc()
        code = 1
    from fgrpo_jax.distributed import leave

    leave(code)
