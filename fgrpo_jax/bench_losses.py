"""What the losses cost, against the memory floor."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from fgrpo_jax import aggregators, kl, losses
from fgrpo_jax.advantages import focal_weight, group_advantage
from fgrpo_jax.timing import timed

ROWS, TOKENS, SAMPLES = 512, 4096, 8  # B, T, N


def _inputs() -> tuple[jax.Array, ...]:
    """logp, old_logp [B, T], reward [P, N], mask [B, T], as after a few updates."""
    keys = jax.random.split(jax.random.key(0), 4)
    old_logp_BT = -jax.random.exponential(keys[0], (ROWS, TOKENS))
    logp_BT = old_logp_BT + 0.1 * jax.random.normal(keys[1], (ROWS, TOKENS))
    reward_PN = jax.random.bernoulli(keys[2], 0.5, (ROWS // SAMPLES, SAMPLES)).astype(jnp.float32)
    length_B = jax.random.randint(keys[3], (ROWS,), TOKENS // 4, TOKENS + 1)
    return logp_BT, old_logp_BT, reward_PN, jnp.arange(TOKENS)[None] < length_B[:, None]


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
    calls = {name: functools.partial(step, *arguments) for name, step in steps.items()}
    return {name: (1e3 * cpu, 1e3 * wall) for name, (cpu, wall) in timed(calls, repeats).items()}


def run(repeats: int) -> None:
    results = bench_losses(repeats)
    cpu_floor, wall_floor = results["floor"]
    device = jax.devices()[0].device_kind
    table = Table(title=f"value and gradient at B={ROWS}, T={TOKENS} on {device}")
    for column in ("loss", "CPU ms", "x floor", "wall ms", "x floor"):
        table.add_column(column, justify="left" if column == "loss" else "right")
    for name, (cpu, wall) in results.items():
        cells = (f"{cpu:.2f}", f"{cpu / cpu_floor:.2f}", f"{wall:.2f}", f"{wall / wall_floor:.2f}")
        table.add_row(name, *cells)
    Console().print(table)
