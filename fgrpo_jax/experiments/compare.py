"""python -m fgrpo_jax.experiments.compare --config FILE --gammas 0,0.5,1,2 --seeds 5

Trains a config at several exponents of the focal weight and seeds, and draws what became of pass@1
and of pass@k. Each run is fgrpo_jax.main in a folder of its own: the same command goes on where it
was cut off, and with more gammas or seeds adds to what there is. It is evaluated before and after;
with --config.eval.every=N, along the way too. Intervals are of 95 %, over seeds and held-out
problems, both drawn again (bootstrap).
"""

import argparse
import dataclasses
import pathlib
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from rich.console import Console
from rich.table import Table

from fgrpo_jax import UserError, config, jsons, metrics
from fgrpo_jax import main as command_line
from fgrpo_jax.experiments import figures
from fgrpo_jax.pass_at_k import pass_at_k, powers_up_to

DRAWS = 2000  # of the bootstrap
BINS = (0.0, 0.1, 0.5, 0.9)  # success rates before training at which a bin of difficulty begins
LAST = 10  # steps over which what a run ends with is averaged
GROUPS = ("groups_all_wrong", "groups_mixed", "groups_all_right")


@dataclasses.dataclass(frozen=True)
class Run:
    """What one run left."""

    before_P: Int[np.ndarray, " P"]  # right ones of `samples` of each problem at step 0
    after_P: Int[np.ndarray, " P"]
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]


def command(
    arguments: argparse.Namespace, overrides: list[str], gamma: float, seed: int
) -> list[str]:
    """That of one run."""
    return [
        *(sys.executable, "-m", "fgrpo_jax.main", "--config", arguments.config),
        *("--workdir", str(folder(arguments, gamma, seed))),
        *(f"--config.{override}" for override in overrides),
        f"--config.algo.focal_gamma={gamma:g}",
        f"--config.seed={seed}",
    ]


def folder(arguments: argparse.Namespace, gamma: float, seed: int) -> pathlib.Path:
    return pathlib.Path(arguments.workdir) / f"gamma_{gamma:g}_seed_{seed}"


def read_run(path: pathlib.Path, samples: int) -> Run:
    """A run that has ended. Raises UserError where its evaluations had other than `samples`."""
    evaluations = metrics.read_records(path / "evals.jsonl")
    before_P, after_P = (_counts(path, evaluations[i]["step"], samples) for i in (0, -1))
    return Run(before_P, after_P, metrics.read_records(path / "metrics.jsonl"), evaluations)


def _counts(path: pathlib.Path, step: int, samples: int) -> Int[np.ndarray, " P"]:
    found = {}
    for file in path.glob(f"evaluation/step_{step}.*.jsonl"):
        for line in jsons.read_lines(file):
            record = jsons.parse(line)
            if record["samples"] != samples:
                raise UserError(
                    f"{file} has {record['samples']} samples a problem, not {samples}: give "
                    "another --workdir"
                )
            found[record["problem"]] = record["correct"]
    return np.array([found[problem] for problem in sorted(found)])


def pass_table(counts_SP: Int[np.ndarray, "S P"], samples: int) -> Float[np.ndarray, "K S P"]:
    """pass@k of each problem of each seed, k = 1, 2, 4 ... samples."""
    flat = counts_SP.reshape(-1)
    table = [pass_at_k(flat, samples, k) for k in powers_up_to(samples)]
    return np.stack(table).reshape(len(table), *counts_SP.shape)


def interval(values_KSP: Float[np.ndarray, "K S P"], seed: int = 0) -> Float[np.ndarray, "3 K"]:
    """Mean over seeds and problems, and its 95 % interval: both drawn again, DRAWS times."""
    draw = np.random.default_rng(seed)
    _, S, P = values_KSP.shape
    means = []
    for _ in range(DRAWS):
        weight_S = np.bincount(draw.integers(0, S, S), minlength=S) / S
        weight_P = np.bincount(draw.integers(0, P, P), minlength=P) / P
        means.append(weight_S @ values_KSP @ weight_P)
    low, high = np.percentile(means, (2.5, 97.5), axis=0)
    return np.stack([values_KSP.mean((1, 2)), low, high])


def difficulty(rate_P: Float[np.ndarray, " P"]) -> list[tuple[str, np.ndarray]]:
    """The bins that hold problems: a name, and which. By the success rate before training."""
    ends = (*BINS, 1.01)
    bins = [
        (f"{100 * low:g} to {min(100 * high, 100):g} %", (rate_P >= low) & (rate_P < high))
        for low, high in zip(ends, ends[1:], strict=False)
    ]
    return [(name, inside_P) for name, inside_P in bins if inside_P.any()]


def analyse(runs: dict[float, list[Run]], samples: int) -> list[dict[str, Any]]:
    """Rows of panel, gamma (-1: before training), x, value, low, high.

    Panels: pass@k by k; gain, its difference from the first gamma of the same seed and problem;
    easy..., pass@1 and pass@samples by bin of difficulty; the metrics of steps and evaluations.
    """
    ks, rows = powers_up_to(samples), []

    def add(panel: str, gamma: float, xs: Sequence[Any], values: np.ndarray) -> None:
        rows.extend(
            {"panel": panel, "gamma": gamma, "x": x, "value": v, "low": low, "high": high}
            for x, v, low, high in zip(xs, *values.tolist(), strict=True)
        )

    before_SP = np.stack([run.before_P for some in runs.values() for run in some])
    start_KSP = pass_table(before_SP, samples)
    add("pass@k", -1.0, ks, interval(start_KSP))
    tables = {
        gamma: pass_table(np.stack([run.after_P for run in some]), samples)
        for gamma, some in runs.items()
    }
    base = next(iter(tables))
    rate_P = before_SP.mean(0) / samples
    for gamma, table_KSP in tables.items():
        add("pass@k", gamma, ks, interval(table_KSP))
        if gamma != base:
            add("gain", gamma, ks, interval(table_KSP - tables[base]))
    for name, inside_P in difficulty(rate_P):
        label = f"{name} ({inside_P.sum()})"
        for gamma, table_KSP in {-1.0: start_KSP, **tables}.items():
            ends = interval(table_KSP[[0, -1]][..., inside_P])
            for i, panel in enumerate(("pass@1 by difficulty", f"pass@{samples} by difficulty")):
                add(panel, gamma, [label], ends[:, i : i + 1])
    for gamma, some in runs.items():
        for panel in (*GROUPS, "entropy", "reward"):
            values_ST = np.array([[step[panel] for step in run.steps] for run in some], float)
            add(panel, gamma, [step["step"] for step in some[0].steps], _over_seeds(values_ST))
        for panel in ("pass@1", f"pass@{samples}"):
            values_ST = np.array([[e[panel] for e in run.evaluations] for run in some], float)
            add(panel, gamma, [e["step"] for e in some[0].evaluations], _over_seeds(values_ST))
    return rows


def _over_seeds(values_ST: Float[np.ndarray, "S T"]) -> Float[np.ndarray, "3 T"]:
    """Mean, lowest and highest."""
    return np.stack([values_ST.mean(0), values_ST.min(0), values_ST.max(0)])


def draw(rows: list[dict[str, Any]], samples: int, path: pathlib.Path, caption: str) -> None:
    gammas = sorted({row["gamma"] for row in rows} - {-1.0})
    look = {-1.0: ("#999999", "x", "before")}
    for color, marker, gamma in zip(figures.COLORS, figures.MARKERS, gammas, strict=False):
        look[gamma] = (color, marker, f"γ = {gamma:g}")

    def curve(
        axis: Any, panel: str, gamma: float, smooth: int = 1, band: bool = True, **settings: Any
    ) -> None:
        mine = [row for row in rows if (row["panel"], row["gamma"]) == (panel, gamma)]
        if not mine:
            return
        x, value, low, high = (
            _smooth([row[name] for row in mine], smooth) for name in ("x", "value", "low", "high")
        )
        color, marker, label = look[gamma]
        settings = {"marker": "" if smooth > 1 else marker, "label": label} | settings
        axis.plot(x, value, color=color, **settings)
        if band:
            axis.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)

    along = len({row["x"] for row in rows if row["panel"] == "pass@1"}) > 2
    with figures.panels(3 + along, 2, 2.3) as (figure, axes):
        (all_k, gain), (easy, hard), (groups, over), *last = axes
        for gamma in look:
            curve(all_k, "pass@k", gamma)
            curve(gain, "gain", gamma)
        for axis in (all_k, gain):
            axis.set_xscale("log", base=2)
            ks = powers_up_to(samples)[::2]
            axis.set_xticks(ks, [str(k) for k in ks])
        all_k.set(xlabel="k", ylabel="pass@k", title="held-out problems after training")
        all_k.legend(loc="lower right")
        gain.axhline(0, color="#999999", linewidth=0.8)
        gain.set(xlabel="k", ylabel=f"pass@k minus that of γ = {gammas[0]:g}", title="difference")
        for axis, k in ((easy, 1), (hard, samples)):
            panel = f"pass@{k} by difficulty"
            names = list(dict.fromkeys(row["x"] for row in rows if row["panel"] == panel))
            for place, gamma in enumerate(look):
                mine = [r for r in rows if (r["panel"], r["gamma"]) == (panel, gamma)]
                x = np.arange(len(names)) + 0.12 * (place - len(look) / 2)
                value, low, high = (
                    np.array([r[n] for r in mine]) for n in ("value", "low", "high")
                )
                color, marker, _ = look[gamma]
                axis.errorbar(x, value, (value - low, high - value), fmt=marker, color=color)
            axis.set_xticks(range(len(names)), names, fontsize=6)
            axis.set(ylabel=f"pass@{k}", xlabel="pass@1 before training (problems)")
        steps = max(row["x"] for row in rows if row["panel"] == "reward")
        window = max(1, steps // 20)
        for panel, style in zip(GROUPS, ("-", "--", ":"), strict=True):
            for gamma in gammas:
                curve(groups, panel, gamma, window, band=False, linestyle=style, label="_")
        for style, name in (("-", "all wrong"), ("--", "mixed"), (":", "all right")):
            groups.plot([], [], style, color="#555555", label=name)
        groups.set(xlabel="step", ylabel="share of groups", ylim=(0, 1))
        groups.legend(loc="upper right")
        for gamma in gammas:
            curve(over, "entropy", gamma, window)
        over.set(xlabel="step", ylabel="entropy (nats a token)", ylim=(0, None))
        for axis, k in zip(last[0] if along else (), (1, samples), strict=False):
            for gamma in gammas:
                curve(axis, f"pass@{k}", gamma)
                if k == 1:
                    curve(axis, "reward", gamma, window, band=False, linestyle=":", label="_")
            name = f"held-out pass@{k}" + ", reward (dotted)" * (k == 1)
            axis.set(xlabel="step", ylabel=name)
        figures.save(figure, path, caption)


def _smooth(values: Sequence[float | int], window: int) -> np.ndarray:
    return np.convolve(values, np.full(window, 1 / window), "valid")


def table(rows: list[dict[str, Any]], runs: dict[float, list[Run]], samples: int) -> Table:
    """The paper's table 4, with intervals, and what the runs ended with."""
    ks = [k for k in powers_up_to(samples) if k in (1, samples // 2, samples)]
    out = Table("gamma", *(f"pass@{k} %" for k in ks), "entropy", "all right")
    for gamma in sorted({row["gamma"] for row in rows if row["panel"] == "pass@k"}):
        found = {r["x"]: r for r in rows if (r["panel"], r["gamma"]) == ("pass@k", gamma)}
        cells = [
            f"{100 * found[k]['value']:.1f} ({100 * found[k]['low']:.1f} to "
            f"{100 * found[k]['high']:.1f})"
            for k in ks
        ]
        steps = [step for run in runs.get(gamma, []) for step in run.steps[-LAST:]]
        ends = [
            f"{np.mean([step[name] for step in steps]):.3f}" if steps else ""
            for name in ("entropy", "groups_all_right")
        ]
        out.add_row(f"{gamma:g}" if gamma >= 0 else "before", *cells, *ends)
    return out


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description="Gammas and seeds of a config.", allow_abbrev=False
    )
    parser.add_argument("--config", required=True, help="Python file with get_config()")
    parser.add_argument("--gammas", default="0,0.5,1,2", help="exponents, joined by commas")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each, of seeds 0, 1, ...")
    parser.add_argument("--samples", type=int, default=256, help="a problem in each evaluation")
    parser.add_argument("--workdir", help="default runs/compare_<name of the config>")
    arguments, rest = parser.parse_known_args(argv)
    arguments.workdir = arguments.workdir or f"runs/compare_{pathlib.Path(arguments.config).stem}"
    console = Console(highlight=False, soft_wrap=True)
    caption = figures.command("compare", argv)
    return command_line.exit_code(lambda: compare(arguments, rest, console, caption))


def compare(arguments: argparse.Namespace, rest: list[str], console: Console, caption: str) -> int:
    """Makes the runs that lack; draws what all of them show. The exit code of one that failed."""
    if not re.fullmatch(r"\d+(\.\d+)?(,\d+(\.\d+)?)*", arguments.gammas):
        raise UserError(f"--gammas is {arguments.gammas!r}: give numbers joined by commas")
    gammas = sorted({float(gamma) for gamma in arguments.gammas.split(",")})
    if arguments.seeds < 1 or arguments.samples < 1:
        raise UserError("--seeds and --samples must be above 0")
    evaluation = [f"eval.samples={arguments.samples}", "eval.every=0"]
    overrides = evaluation + command_line.overrides(rest)
    config.load(arguments.config, overrides)  # its mistakes, once
    for seed in range(arguments.seeds):  # in the outer loop: all gammas go on alike
        for gamma in gammas:
            if not (folder(arguments, gamma, seed) / "summary.json").exists():
                code = subprocess.run(command(arguments, overrides, gamma, seed)).returncode
                if code:
                    return code
    runs = {
        gamma: [
            read_run(folder(arguments, gamma, seed), arguments.samples)
            for seed in range(arguments.seeds)
        ]
        for gamma in gammas
    }
    rows = analyse(runs, arguments.samples)
    path = pathlib.Path(arguments.workdir) / "compare.csv"
    figures.write_csv(path, rows)
    draw(rows, arguments.samples, path.with_suffix(".png"), caption)
    console.print(table(rows, runs, arguments.samples))
    console.print(f"picture: {path.with_suffix('.png')}, data: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
