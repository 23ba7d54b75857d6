"""The end of a run: its table and its picture."""

import io
from typing import Any

from rich.table import Table

from fgrpo_jax.pass_at_k import powers_up_to

BLUE, ORANGE, GREY = "#0072B2", "#E69F00", "#BBBBBB"  # Okabe and Ito: safe for the colour-blind


def table(before: dict[str, Any], after: dict[str, Any], samples: int) -> Table:
    """before / after, at pass@1, 4, 16 as far as there are so many samples."""
    out = Table("held-out", "before", "after", "change")
    for k in (1, 4, 16):
        if k <= samples:
            old, new = (100 * result[f"pass@{k}"] for result in (before, after))
            out.add_row(f"pass@{k}", f"{old:.1f} %", f"{new:.1f} %", f"{new - old:+.1f}")
    return out


def draw(
    title: str,
    steps: list[dict[str, Any]],
    evaluations: list[dict[str, Any]],
    samples: int,
) -> bytes:
    """A PNG: reward by step; pass@k by k, before and after; pass@1 by kind of problem."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    before, after = evaluations[0], evaluations[-1]
    figure, (left, middle, right) = plt.subplots(
        1, 3, figsize=(13, 4.2), width_ratios=(1, 1, 1.3), layout="constrained"
    )
    figure.suptitle(title)

    x = [record["step"] for record in steps]
    reward = [record["reward"] for record in steps]
    left.plot(x, reward, color=GREY, linewidth=1, label="reward of each step")
    smooth, level = [], reward[0] if reward else 0.0
    for value in reward:
        level += 0.1 * (value - level)
        smooth.append(level)
    left.plot(x, smooth, color=BLUE, linewidth=2, label="moving average (0.1)")
    left.plot(
        [record["step"] for record in evaluations],
        [record["pass@1"] for record in evaluations],
        "o--",
        color=ORANGE,
        label="held-out pass@1",
    )
    left.set(xlabel="step", ylabel="mean reward, pass@1", ylim=(0, 1), title="learning")
    left.legend(loc="lower right", fontsize=8)

    ks = powers_up_to(samples)
    for result, color, marker, name in (
        (before, GREY, "s", "before"),
        (after, BLUE, "o", "after"),
    ):
        middle.plot(ks, [result[f"pass@{k}"] for k in ks], marker=marker, color=color, label=name)
    middle.set(xlabel="k", ylabel="pass@k", ylim=(0, 1.02), title="held-out problems")
    middle.set_xscale("log", base=2)
    middle.set_xticks(ks, [str(k) for k in ks])
    middle.legend(loc="lower right", fontsize=8)

    kinds = sorted(before["by_kind"], key=lambda kind: before["by_kind"][kind])
    places = range(len(kinds))
    right.barh(places, [after["by_kind"][kind] for kind in kinds], color=BLUE, label="after")
    right.barh(
        places,
        [before["by_kind"][kind] for kind in kinds],
        height=0.35,
        color=ORANGE,
        label="before",
    )
    labels = [kind[:40] for kind in kinds]  # a data file's words, and no formulas
    right.set_yticks(places, labels, fontsize=7, parse_math=False)
    right.set(xlabel="pass@1", xlim=(0, 1), title="by kind of problem")
    right.legend(loc="lower right", fontsize=8)
    png = io.BytesIO()
    figure.savefig(png, dpi=120)
    plt.close(figure)
    return png.getvalue()
