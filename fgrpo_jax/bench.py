"""python -m fgrpo_jax.bench losses: what the losses cost, against the memory floor."""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from fgrpo_jax import aggregators, kl, losses
from fgrpo_jax.advantages import focal_weight, group_advantage

ROWS, TOKENS, SAMPLES = 512, 4096, 8  # B, T, N


def _inputs() -> tuple[jax.Array, ...]:
    """logp, old_logp [B, T], reward [P, N], mask [B, T], as after a few updates."""
    keys = jax.random.split(jax.random.key(0), 4)
    old_logp_BT = -jax.random.exponential(keys[0], (ROWS, TOKENS))
    logp_BT = old_logp_BT + 0.1 * jax.random.normal(keys[1], (ROWS, TOKENS))
    reward_PN = jax.random.bernoulli(keys[2], 0.5, (ROWS // SAMPLES, SAMPLES)).astype(jnp.float32)
    length_B = jax.random.randint(keys[3], (ROWS,), TOKENS // 4, TOKENS + 1)
    return logp_BT, old_logp_BT, reward_PN, jnp.arange(TOKENS)[None] < length_B[:, None]


def _cpu_and_wall(step: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[float, float]:
    cpu, wall = time.process_time(), time.perf_counter()
    jax.block_until_ready(step(*arguments))
    return time.process_time() - cpu, time.perf_counter() - wall


def bench_losses(repeats: int) -> dict[str, tuple[float, float]]:
    """Median milliseconds (CPU, wall) of advantage, loss and gradient, by surrogate; "floor" is a
    plain jitted sum over the same arrays: what reading them costs."""
    logp_BT, old_logp_BT, reward_PN, mask_BT = _inputs()

    def whole(loss_of: Callable[..., jax.Array]) -> Callable[..., Any]:
        def loss(logp_BT, old_logp_BT, reward_PN, mask_BT):
            adv_PN = group_advantage(reward_PN) * focal_weight(reward_PN, 0.5)[:, None]
            loss_BT = loss_of(logp_BT, old_logp_BT, adv_PN.reshape(-1, 1), mask_BT)
            total, count = aggregators.token_mean(loss_BT, mask_BT)
            return total / count

        return jax.jit(jax.value_and_grad(loss))

    @jax.jit
    def floor(logp_BT, old_logp_BT, reward_PN, mask_BT):
        return logp_BT.sum() + old_logp_BT.sum() + reward_PN.sum() + mask_BT.sum()

    steps = {
        "floor": floor,
        "ppo_clip": whole(lambda logp, old, adv, _: losses.ppo_clip(logp, old, adv)),
        "cispo": whole(lambda logp, old, adv, _: losses.cispo(logp, old, adv)),
        "gspo": whole(losses.gspo),
        "gspo_token": whole(losses.gspo_token),
        "gmpo": whole(losses.gmpo),
        "sapo": whole(lambda logp, old, adv, _: losses.sapo(logp, old, adv)),
        "reinforce": whole(lambda logp, old, adv, _: losses.policy_gradient(logp, adv)),
        "ppo_clip + k3": whole(
            lambda logp, old, adv, _: losses.ppo_clip(logp, old, adv) + 1e-3 * kl.k3(logp, old)
        ),
    }
    arguments = (logp_BT, old_logp_BT, reward_PN, mask_BT)
    for step in steps.values():
        jax.block_until_ready(step(*arguments))
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for _ in range(repeats):  # in turn, so that a busy moment of the machine meets all alike
        for name, step in steps.items():
            times[name].append(_cpu_and_wall(step, arguments))
    median = lambda xs: 1e3 * statistics.median(xs)
    return {
        name: (median(cpu for cpu, _ in pairs), median(wall for _, wall in pairs))
        for name, pairs in times.items()
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["losses"])
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args(argv)
    results = bench_losses(arguments.repeats)
    cpu_floor, wall_floor = results["floor"]
    device = jax.devices()[0].device_kind
    table = Table(title=f"value and gradient at B={ROWS}, T={TOKENS} on {device}")
    for column in ("loss", "CPU ms", "x floor", "wall ms", "x floor"):
        table.add_column(column, justify="left" if column == "loss" else "right")
    for name, (cpu, wall) in results.items():
        cells = (f"{cpu:.2f}", f"{cpu / cpu_floor:.2f}", f"{wall:.2f}", f"{wall / wall_floor:.2f}")
        table.add_row(name, *cells)
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
