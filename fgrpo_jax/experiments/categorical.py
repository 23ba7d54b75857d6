"""python -m fgrpo_jax.experiments.categorical --config FILE: the paper's figure 2.

One prompt with V answers, of which the first is right and likely, more are right and rare, the rest
wrong; the policy is a softmax over one logit each. Group sizes between very small and very large
make the mass of the right ones grow while most of them are forgotten; the focal weight slows that.
"""

import functools
import math
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float
from ml_collections import ConfigDict
from rich.console import Console
from rich.table import Table

from fgrpo_jax import UserError, config, main, sharding
from fgrpo_jax import workdir as workdirs
from fgrpo_jax.config import Config
from fgrpo_jax.experiments import figures

METRICS = ("right_mass", "retained", "entropy")
SHOWN = (2, 256, 8192, 131_072)  # group sizes of the curves over steps


def default() -> Config:
    """The paper's settings (section 5.1, appendix J), and ours where it has none."""
    c = ConfigDict()
    c.seed = 0  # of the first run; the others' follow
    c.seeds = 4  # runs a setting
    c.actions = 128_000  # V, answers
    c.right = 10_000  # of them are right: reward 1, the others' is -1
    c.anchor_logit = 5.0  # of the first, right one
    c.right_logit = 3.0  # of the other right ones
    c.wrong_logit = 0.0  # of the wrong ones
    c.samples = tuple(2**i for i in range(1, 18))  # N, group sizes
    c.gammas = (0.0, 1.0)  # exponents of the focal weight
    c.steps = 1000  # updates
    c.every = 25  # updates between two records
    c.surrogate = "log"  # r log p, whose gradient is that of a ratio; linear: r p, as printed
    c.optimizer = "adam"  # adam, or sgd
    c.learning_rate = 0.01  # of gradient ascent
    c.weight_decay = 0.0  # decoupled; other than 0, right mass falls at small N
    return c.lock()


def draw_counts(key: Array, p_V: Float[Array, " V"], n: int) -> Float[Array, " V"]:
    """How often each action comes in n independent draws.

    By two uniform numbers a draw, one for a row of about sqrt(V) actions and one for the place in
    it: one alone, of 24 bits, would be too coarse for actions of probability 1e-7.
    """
    V = p_V.shape[0]
    width = 1 << (V.bit_length() // 2)
    rows = -(-V // width)
    up_to_RW = jnp.cumsum(jnp.pad(p_V, (0, rows * width - V)).reshape(rows, width), axis=1)
    up_to_R = jnp.cumsum(up_to_RW[:, -1])
    for_row, for_place = jax.random.uniform(key, (2, n))
    row = _first_above(up_to_R, jnp.zeros(n, jnp.int32), rows, for_row * up_to_R[-1])
    target = for_place * up_to_RW[row, -1]
    place = _first_above(up_to_RW.reshape(-1), row * width, width, target)
    return jnp.zeros(V).at[row * width + place].add(1.0)


def _first_above(table: Array, start: Array, length: int, target: Array) -> Array:
    """The first place of table[start : start + length], which rises, above each target; else its
    last."""
    found = jnp.zeros_like(start)
    for bit in reversed(range((length - 1).bit_length())):
        ahead = found + (1 << bit)
        below = table[start + jnp.minimum(ahead, length) - 1] <= target
        found = jnp.where(below & (ahead < length), ahead, found)
    return found


def gradient(
    logit_V: Float[Array, " V"],
    count_V: Float[Array, " V"],
    reward_V: Float[Array, " V"],
    gamma: Float[Array, ""],
    surrogate: str,
) -> Float[Array, " V"]:
    """By the logits, of g (1/N) sum_j (r_j - mean r) log p_j, or p_j where it is "linear", over the
    N draws that are counted; g = (1 - success rate)^gamma, of rewards of 1 and -1."""
    n, p_V = count_V.sum(), jax.nn.softmax(logit_V)
    mean = (count_V * reward_V).sum() / n
    weight_V = (1 - (mean + 1) / 2) ** gamma * count_V * (reward_V - mean) / n
    if surrogate == "linear":
        weight_V *= p_V
    return weight_V - p_V * weight_V.sum()


def measure(
    logit_V: Float[Array, " V"], first_V: Float[Array, " V"], right_V: Bool[Array, " V"]
) -> Float[Array, "3"]:
    """METRICS: the probability of all right actions, the share of their first probability that
    none of them has lost (eq 26), and the entropy in nats."""
    logp_V = jax.nn.log_softmax(logit_V)
    p_V = jnp.exp(logp_V)
    lost = jnp.where(right_V, jnp.maximum(first_V - p_V, 0), 0).sum()
    right, first = (jnp.where(right_V, x_V, 0).sum() for x_V in (p_V, first_V))
    return jnp.stack([right, 1 - lost / first, -(p_V * logp_V).sum()])


def make_simulate(c: Config, n: int) -> Callable[[Array, Array], Float[Array, "points 3"]]:
    """simulate(gamma, key) -> METRICS at the start and after each `c.every` updates."""
    place_V = jnp.arange(c.actions)
    right_V = place_V < c.right
    logit_V = jnp.where(right_V, c.right_logit, c.wrong_logit).at[0].set(c.anchor_logit)
    reward_V = jnp.where(right_V, 1.0, -1.0)
    first_V = jax.nn.softmax(logit_V)
    optimizer = {
        "adam": functools.partial(optax.adamw, weight_decay=c.weight_decay),
        "sgd": optax.sgd,
    }[c.optimizer](c.learning_rate)

    def simulate(gamma: Array, key: Array) -> Array:
        def update(carry: Any, step: Array) -> tuple[Any, None]:
            logit_V, state = carry
            count_V = draw_counts(jax.random.fold_in(key, step), jax.nn.softmax(logit_V), n)
            ascent_V = gradient(logit_V, count_V, reward_V, gamma, c.surrogate)
            with jax.numpy_dtype_promotion("standard"):  # optax's own arithmetic needs it
                change_V, state = optimizer.update(-ascent_V, state, logit_V)
            return (optax.apply_updates(logit_V, change_V), state), None

        def stretch(carry: Any, steps: Array) -> tuple[Any, Array]:
            carry, _ = jax.lax.scan(update, carry, steps)
            return carry, measure(carry[0], first_V, right_V)

        steps = jnp.arange(c.steps).reshape(-1, c.every)
        _, records = jax.lax.scan(stretch, (logit_V, optimizer.init(logit_V)), steps)
        return jnp.concatenate([measure(logit_V, first_V, right_V)[None], records])

    return simulate


def run(c: Config, n: int) -> list[dict[str, Any]]:
    """The records of one group size, of all gammas and seeds, which devices share."""
    over_gammas = jax.vmap(make_simulate(c, n), in_axes=(0, None))
    over_seeds = jax.vmap(over_gammas, in_axes=(None, 0))
    count = math.gcd(c.seeds, jax.device_count())
    keys = jnp.stack([jax.random.key(c.seed + i) for i in range(c.seeds)])
    with jax.set_mesh(sharding.make_mesh(1, count, 1, jax.devices()[:count])):
        simulate = jax.jit(sharding.local(over_seeds, ("", "B"), "B"))
        found = np.asarray(simulate(jnp.array(c.gammas, jnp.float32), keys))
    return [
        {"samples": n, "gamma": gamma, "seed": c.seed + s, "step": point * c.every}
        | dict(zip(METRICS, map(float, found[s, g, point]), strict=True))
        for g, gamma in enumerate(c.gammas)
        for s in range(c.seeds)
        for point in range(found.shape[2])
    ]


def finals(rows: list[dict[str, Any]]) -> dict[tuple[float, int], dict[str, float]]:
    """By (gamma, samples), the seeds' mean of each metric after the last step, and of the lowest
    share that was retained, and "error" the standard error of what is retained."""
    last = max(row["step"] for row in rows)
    out = {}
    for key in sorted({(row["gamma"], row["samples"]) for row in rows}):
        mine = [row for row in rows if (row["gamma"], row["samples"]) == key]
        end = [row for row in mine if row["step"] == last]
        out[key] = {name: float(np.mean([row[name] for row in end])) for name in METRICS}
        out[key]["lowest"] = min(row["retained"] for row in mine)
        spread = np.std([row["retained"] for row in end], ddof=1) if len(end) > 1 else 0.0
        out[key]["error"] = float(spread) / math.sqrt(len(end))
    return out


def statements(rows: list[dict[str, Any]]) -> dict[str, bool]:
    """What the paper says of figure 2, and whether it holds of these records."""
    end = finals(rows)
    start = rows[0]["right_mass"]
    plain = {n: end[gamma, n] for gamma, n in end if gamma == 0}
    focal = {n: end[gamma, n] for gamma, n in end if gamma == 1}
    small, *between, large = sorted(plain)
    middle = [n for n in between if plain[n]["retained"] < 0.5]
    return {
        "the right answers' mass grows at every group size": all(
            values["right_mass"] > start for values in plain.values()
        ),
        "it grows faster with larger groups, up to the middle": bool(middle)
        and plain[small]["right_mass"] < 0.7 < 0.95 < plain[middle[0]]["right_mass"],
        "the smallest groups keep the first right answers": plain[small]["retained"] > 0.95,
        "groups between lose most of them": bool(middle)
        and min(plain[n]["retained"] for n in middle) < 0.1,
        "the largest keep them, all along": plain[large]["lowest"] > 0.95,
        "no other with as much right mass does": all(
            values["lowest"] < 0.9
            for n, values in plain.items()
            if n != large and values["right_mass"] > 0.9
        ),
        "the focal weight keeps more where they are lost": bool(middle and focal)
        and all(focal[n]["retained"] > plain[n]["retained"] for n in middle),
    }


def draw(c: Config, rows: list[dict[str, Any]], path: pathlib.Path, command: str) -> None:
    """Right mass and what is retained by step, and both after the last step by group size."""
    end = finals(rows)
    styles = dict(zip(c.gammas, ("-", "--", ":", "-."), strict=False))
    sizes = [n for n in SHOWN if n in c.samples] or list(c.samples[:4])
    with figures.panels(1, 3, 2.7) as (figure, (left, middle, right)):
        for axis, name, label in (
            (left, "right_mass", "mass of right answers"),
            (middle, "retained", "share of it retained"),
        ):
            for color, n in zip(figures.COLORS, sizes, strict=False):
                axis.plot([], [], color=color, label=f"N = {n:,}")
                for gamma, style in styles.items():
                    mine = [r for r in rows if (r["samples"], r["gamma"]) == (n, gamma)]
                    steps = sorted({r["step"] for r in mine})
                    means = [np.mean([r[name] for r in mine if r["step"] == s]) for s in steps]
                    axis.plot(steps, means, style, color=color)
            axis.set(xlabel="step", ylabel=label, ylim=(0, 1.02))
        for name, color in (("right_mass", figures.COLORS[2]), ("retained", figures.COLORS[1])):
            right.plot([], [], marker=".", color=color, label=name.replace("_", " "))
            for gamma, style in styles.items():
                values = [end[gamma, n][name] for n in c.samples]
                right.plot(c.samples, values, style, marker=".", color=color)
        _shade(right, [(n, end[c.gammas[0], n]["retained"]) for n in c.samples])
        right.set_xscale("log", base=2)
        right.set(xlabel="group size N", ylabel=f"after {c.steps:,} steps", ylim=(0, 1.12))
        for axis, letter in ((left, "a"), (middle, "b"), (right, "c")):
            axis.set_title(f"({letter})", loc="left", x=-0.2, pad=14)
            axis.legend(loc="lower right", bbox_to_anchor=(1.02, 1), ncols=2, fontsize=6)
        lines = zip(c.gammas, ("solid", "dashed", "dotted", "dash-dotted"), strict=False)
        key = ", ".join(f"{line}: γ = {gamma:g}" for gamma, line in lines)
        figures.save(figure, path, f"{key}. {command}")


def _shade(axis: Any, retained: list[tuple[int, float]]) -> None:
    """The regimes: before, in and after the sizes at which less than half is retained."""
    lost = [n for n, share in retained if share < 0.5]
    if not lost:
        return
    first, last = lost[0] / math.sqrt(2), lost[-1] * math.sqrt(2)
    ends = [retained[0][0] / math.sqrt(2), first, last, retained[-1][0] * math.sqrt(2)]
    axis.axvspan(first, last, color="#BBBBBB", alpha=0.3, linewidth=0)
    for name, low, high in zip(("I", "II", "III"), ends, ends[1:], strict=False):
        if low < high:
            axis.text(math.sqrt(low * high), 1.05, name, ha="center")


def study(c: Config, workdir: pathlib.Path, console: Console, command: str) -> None:
    """Simulates what the workdir lacks; writes categorical.csv and categorical.png, which says the
    command."""
    check(c)
    path = workdir / "categorical.csv"
    with workdirs.locked(workdir):
        workdirs.check(c, workdir, may_change=())
        workdirs.claim(c, workdir)
        rows = figures.read_csv(path)
        for n in c.samples:
            if all(row["samples"] != n for row in rows):
                rows += run(c, n)
                figures.write_csv(path, rows)
                console.print(f"N = {n:,}", end=" ", highlight=False)
        console.print()
        draw(c, rows, path.with_suffix(".png"), command)
    out = Table("N", "gamma", *METRICS, "±")
    for (gamma, n), values in finals(rows).items():
        numbers = [f"{values[name]:.3f}" for name in (*METRICS, "error")]
        out.add_row(f"{n:,}", f"{gamma:g}", *numbers)
    console.print(out)
    if {0.0, 1.0} <= set(c.gammas) and len(c.samples) > 2 and c.steps >= 1000:
        for sentence, holds in statements(rows).items():
            console.print(f"{'holds' if holds else 'does not hold'}: {sentence}", highlight=False)
    console.print(f"picture: {path.with_suffix('.png')}, data: {path}", highlight=False)


def check(c: Config) -> None:
    """UserError where the keys do not fit together."""
    for key, values in (("surrogate", ("log", "linear")), ("optimizer", ("adam", "sgd"))):
        if c[key] not in values:
            raise UserError(f"{key} is {c[key]!r}: it must be one of {', '.join(values)}")
    if not 1 <= c.right < c.actions:
        raise UserError(f"right is {c.right}: it must be from 1 to below actions, {c.actions}")
    for key in ("seeds", "steps", "every"):
        if c[key] < 1:
            raise UserError(f"{key} is {c[key]}: it must be above 0")
    if c.steps % c.every:
        raise UserError(f"steps is {c.steps}: it must be a multiple of every, {c.every}")
    if not c.samples or min(c.samples) < 2:
        raise UserError(f"samples is {c.samples}: give group sizes of 2 or more")
    if not c.gammas or min(c.gammas) < 0:
        raise UserError(f"gammas is {c.gammas}: give exponents of 0 or more")


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", os.cpu_count())  # which share the seeds
    job = functools.partial(study, command=figures.command("categorical", sys.argv[1:]))
    load = functools.partial(config.read, default=default)
    sys.exit(main.run(job, "The paper's figure 2.", sys.argv[1:], load))
