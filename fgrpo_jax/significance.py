"""The paper's paired test between two evaluations of the same problems (appendix Q).

python -m fgrpo_jax.significance A.parquet B.parquet [--m 256] [--draws 50000] [--k 1,256]
compares what two runs of fgrpo_jax.evaluate wrote: positive differences are B's.
"""

import argparse
import pathlib
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int
from rich.console import Console
from rich.table import Table

from fgrpo_jax import UserError
from fgrpo_jax.pass_at_k import pass_at_k

CHUNK = 1 << 21  # counts drawn at a time
Counts = Int[np.ndarray, " P"]


class Test(NamedTuple):
    """Of B's pass@k minus A's."""

    difference: float  # of all samples
    low: float  # the interval of subsamples, of probability 1 - alpha
    high: float
    p: float  # two-sided


def subsampled(
    correct_P: Counts, samples: int, m: int, k: int, draws: int, random: np.random.Generator
) -> Float[np.ndarray, " draws"]:
    """pass@k of m samples of each problem, drawn without replacement, so many times."""
    estimate_C = pass_at_k(np.arange(m + 1), m, k)
    step = max(1, CHUNK // max(1, len(correct_P)))
    means = []
    for start in range(0, draws, step):
        size = (min(step, draws - start), len(correct_P))
        drawn = random.hypergeometric(correct_P, samples - correct_P, m, size)
        means.append(estimate_C[drawn].mean(axis=1))
    return np.concatenate(means)


def paired_test(
    a_P: Counts,
    b_P: Counts,
    samples: int,
    k: int,
    m: int = 256,
    draws: int = 50_000,
    alpha: float = 0.05,
    seed: int = 0,
) -> Test:
    """The paired m-out-of-n test of pass@k, B against A, over the same problems.

    Each draw takes m of each problem's n samples of either, without replacement, and the
    difference of their pass@k. p is twice the smaller share of draws on either side of 0, with
    one draw more on each, so never 0. The problems are taken as they are: it speaks of the
    samples' noise, not of other problems.

    Args:
        a_P, b_P: right samples of each problem, 0 to n.
        samples: n, of both.
        m: 1 to n - 1.
        k: 1 to m.

    Raises:
        ValueError: sizes that do not fit.

    >>> paired_test(np.array([9, 8]), np.array([9, 8]), samples=40, k=1, m=10, draws=100).difference
    0.0
    """
    if len(a_P) != len(b_P) or not len(a_P):
        raise ValueError(
            f"the two have {len(a_P)} and {len(b_P)} problems: give as many, 1 or more"
        )
    if not 1 <= k <= m < samples:
        raise ValueError(f"k is {k}, m {m} and n {samples}: 1 <= k <= m < n must hold")
    random = np.random.default_rng(seed)
    a, b = (subsampled(np.asarray(x), samples, m, k, draws, random) for x in (a_P, b_P))
    low, high = np.quantile(b - a, (alpha / 2, 1 - alpha / 2))
    sides = [(1 + np.count_nonzero(side)) / (1 + draws) for side in (b <= a, b >= a)]
    whole = [pass_at_k(np.asarray(x), samples, k).mean() for x in (b_P, a_P)]
    return Test(float(whole[0] - whole[1]), float(low), float(high), min(1.0, 2 * min(sides)))


def read(path: str) -> tuple[Counts, int]:
    """(right samples by problem, n) of a Parquet file that fgrpo_jax.evaluate wrote."""
    import pyarrow
    from pyarrow import parquet

    if not pathlib.Path(path).is_file():
        raise UserError(f"{path} does not exist: give a file that fgrpo_jax.evaluate wrote")
    try:
        table = parquet.read_table(path, columns=["problem", "samples", "correct"])
        rows: Any = table.sort_by("problem").to_pydict()
    except (pyarrow.ArrowException, OSError, KeyError) as error:
        raise UserError(
            f"{path} is no file of fgrpo_jax.evaluate: it needs the columns problem, samples and "
            f"correct ({str(error).splitlines()[0]:.200})"
        ) from error
    if not rows["problem"] or rows["problem"] != list(range(len(rows["problem"]))):
        raise UserError(f"{path} has not each problem once, from 0")
    if len(set(rows["samples"])) != 1:
        raise UserError(f"{path} has problems of other numbers of samples than others")
    return np.array(rows["correct"]), rows["samples"][0]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fgrpo_jax.significance", allow_abbrev=False,
        description="The paired m-out-of-n test of pass@k, B against A.",
    )  # fmt: skip
    parser.add_argument("a", help="Parquet file of the first evaluation")
    parser.add_argument("b", help="and of the second")
    parser.add_argument("--k", default="1,256", help="joined by commas; those above m are left out")
    parser.add_argument("--m", type=int, help="samples a draw; default 256, or a quarter of n")
    parser.add_argument("--draws", type=int, default=50_000)
    parser.add_argument("--alpha", type=float, default=0.05, help="of the interval")
    arguments = parser.parse_args(argv)
    try:
        out = compare(arguments)
    except (UserError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    Console(highlight=False, soft_wrap=True).print(out)
    return 0


def compare(arguments: argparse.Namespace) -> Table:
    """A row a k. Raises UserError, ValueError."""
    (a_P, n), (b_P, of) = read(arguments.a), read(arguments.b)
    if (n, len(a_P)) != (of, len(b_P)):
        raise UserError(
            f"{arguments.a} has {n} samples of {len(a_P)} problems, {arguments.b} {of} of "
            f"{len(b_P)}: both must be of the same"
        )
    if not all(word.isdigit() for word in arguments.k.split(",")):
        raise UserError(f"--k is {arguments.k!r}: give whole numbers joined by commas")
    m = arguments.m or (256 if n > 256 else max(1, n // 4))
    if arguments.draws < 1 or not 0 < arguments.alpha < 1:
        raise UserError("--draws must be above 0, and --alpha between 0 and 1")
    ks = [k for k in map(int, arguments.k.split(",")) if k <= m] or [1]
    percent = f"{100 * (1 - arguments.alpha):g} %"
    title = f"{len(a_P)} problems, n {n}, m {m}, {arguments.draws:,} draws"
    out = Table("pass@k", "A", "B", "B - A", percent, "p", title=title)
    for k in ks:
        test = paired_test(a_P, b_P, n, k, m, arguments.draws, arguments.alpha)
        cells = [f"{100 * pass_at_k(x, n, k).mean():.1f}" for x in (a_P, b_P)]
        interval = f"{100 * test.low:+.1f} to {100 * test.high:+.1f}"
        out.add_row(str(k), *cells, f"{100 * test.difference:+.1f}", interval, f"{test.p:.2g}")
    return out


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
