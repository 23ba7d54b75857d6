"""What the studies' pictures share: colours, sizes, a caption with the command, data as CSV."""

import contextlib
import csv
import io
import pathlib
import shlex
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from fgrpo_jax import storage

# Okabe and Ito's, which the colour-blind tell apart, from dark to light
COLORS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = "osD^vPX"
WIDTH = 7.0  # inches, of a page's column


@contextlib.contextmanager
def panels(rows: int, columns: int, height: float, **settings: Any) -> Iterator[Any]:
    """(figure, axes) of a grid of panels of so many inches each, in letters that can be read at a
    column's width."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    look: Any = {
        "font.size": 8,
        "axes.titlesize": 8,
        "legend.fontsize": 7,
        "lines.linewidth": 1.4,
        "lines.markersize": 4,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.alpha": 0.25,
    }
    with plt.rc_context(look):
        size = (WIDTH, rows * height + 0.4)
        figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", **settings)
        try:
            yield figure, axes
        finally:
            plt.close(figure)


def command(study: str, argv: Sequence[str]) -> str:
    """What was typed, but for where it should write."""
    words = list(argv)
    if "--workdir" in words:
        place = words.index("--workdir")
        del words[place : place + 2]
    return shlex.join(["python", "-m", f"fgrpo_jax.experiments.{study}", *words])


def save(figure: Any, path: pathlib.Path, command: str) -> None:
    """A PNG whose last line is the command that drew it."""
    figure.supxlabel(textwrap.fill(command, 110), fontsize=6, family="monospace", color="#555555")
    png = io.BytesIO()
    figure.savefig(png, dpi=200)
    storage.write(path, png.getvalue())


def write_csv(path: pathlib.Path, rows: Sequence[dict[str, Any]]) -> None:
    """A line a row under the first one's names; floats with six digits."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow(
            {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in row.items()}
        )
    storage.write(path, text.getvalue())


def read_csv(path: pathlib.Path) -> list[dict[str, Any]]:
    """What `write_csv` wrote, numbers as such; nothing where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [{name: _number(text) for name, text in row.items()} for row in csv.DictReader(file)]


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text
