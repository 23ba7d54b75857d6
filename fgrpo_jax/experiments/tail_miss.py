"""python -m fgrpo_jax.experiments.tail_miss [--workdir DIR]: the paper's figures 1a and 3.

How often a group of n samples can teach and holds none of a rare set of right answers, whose share
of the right ones is rho; with the n at which that is most often.
"""

import argparse
import pathlib
import sys
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from fgrpo_jax import StorageError, theory
from fgrpo_jax.experiments import figures

PANELS = (  # success rate, rare shares, largest n: figure 1a, then figure 3
    (0.3, (0.05, 0.1, 0.2), 128),
    (0.8, (0.01, 0.05, 0.1, 0.2), 512),
    (0.5, (0.01, 0.05, 0.1, 0.2), 512),
    (0.2, (0.01, 0.05, 0.1, 0.2), 512),
)


def curves() -> list[dict[str, Any]]:
    """A row a success rate, share and n, with the peak of its curve and the estimate of that."""
    rows = []
    with jax.enable_x64(True):
        for mu, shares, most in PANELS:
            n = np.arange(1, most + 1)
            for rho in shares:
                found = theory.tail_miss_probability(mu, mu * rho, n)
                peak = int(theory.peak_group_size(mu, mu * rho))
                estimate = float(theory.peak_group_size_estimate(mu, mu * rho))
                rows += [
                    {"mu": mu, "rho": rho, "n": int(size), "probability": float(probability),
                     "peak": peak, "estimate": estimate}
                    for size, probability in zip(n, found, strict=True)
                ]  # fmt: skip
    return rows


def draw(rows: list[dict[str, Any]], path: pathlib.Path) -> None:
    with figures.panels(2, 2, 2.2) as (figure, axes):
        for axis, (mu, shares, most) in zip(axes.flat, PANELS, strict=True):
            peaks = []
            for number, rho in enumerate(shares, 4 - len(shares)):  # a share, a colour
                curve = [row for row in rows if row["mu"] == mu and row["rho"] == rho][:most]
                color, peak = figures.COLORS[number], curve[0]["peak"]
                n, values = ([row[name] for row in curve] for name in ("n", "probability"))
                axis.plot(n, values, color=color, label=f"ρ = {rho:g}")
                axis.plot(peak, values[peak - 1], "*", color=color, markersize=9)
                peaks.append(str(peak))
            axis.set_xscale("log", base=2)
            ticks = [2**i for i in range(0, most.bit_length(), 1 if most <= 128 else 2)]
            axis.set_xticks(ticks, [str(tick) for tick in ticks])
            axis.set(xlabel="group size n", ylabel="Pr(can teach, rare missed)", ylim=(0, 1.02))
            axis.set_title(f"success rate μ = {mu:g}, peaks at n = {', '.join(peaks)}")
        lines = axes.flat[1].get_legend_handles_labels()
        title = "rare share ρ of the right answers; stars: peaks"
        figure.legend(*lines, loc="outside upper center", ncols=4, title=title, frameon=False)
        figures.save(figure, path, figures.command("tail_miss", []))


def table(rows: list[dict[str, Any]]) -> Table:
    out = Table("mu", "rho", "peak n", "estimate", "probability there")
    for row in rows:
        if row["n"] == row["peak"]:
            cells = f"{row['mu']:g} {row['rho']:g} {row['peak']} {row['estimate']:.1f}".split()
            out.add_row(*cells, f"{row['probability']:.3f}")
    return out


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Figures 1a and 3.", allow_abbrev=False)
    parser.add_argument("--workdir", default="runs/tail_miss", help="of tail_miss.png and .csv")
    folder = pathlib.Path(parser.parse_args(argv).workdir)
    rows = curves()
    try:
        figures.write_csv(folder / "tail_miss.csv", rows)
        draw(rows, folder / "tail_miss.png")
    except StorageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 74
    Console().print(table(rows))
    print(f"picture: {folder / 'tail_miss.png'}, data: {folder / 'tail_miss.csv'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
