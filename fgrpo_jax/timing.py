"""CPU and wall seconds of calls, and what this machine can do at best."""

import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def timed(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, tuple[float, float]]:
    """Median (CPU, wall) seconds of each call, results waited for, after one that is not counted.

    The calls take turns, so that a busy moment of the machine meets all alike. CPU seconds are
    those of this process, all its threads together.
    """
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for repeat in range(repeats + 1):
        for name, call in calls.items():
            cpu, wall = time.process_time(), time.perf_counter()
            jax.block_until_ready(call())
            if repeat:
                times[name].append((time.process_time() - cpu, time.perf_counter() - wall))
    return {
        name: (statistics.median(c for c, _ in pairs), statistics.median(w for _, w in pairs))
        for name, pairs in times.items()
    }


def ceilings(repeats: int = 5, size: int = 2048, dtype: Any = jnp.float32) -> dict[str, float]:
    """What a large square matmul and a large copy reach in this process."""
    x = jnp.ones((size, size), dtype)
    y = jnp.ones((64 << 20) // x.dtype.itemsize, dtype)
    matmul, copy = jax.jit(lambda x: x @ x), jax.jit(lambda y: y + 1)
    times = timed({"matmul": lambda: matmul(x), "copy": lambda: copy(y)}, repeats)
    flop, moved = 2 * size**3 / 1e9, 2 * y.nbytes / 1e9
    return {
        "matmul_gflop_per_cpu_s": flop / times["matmul"][0],
        "matmul_gflop_per_s": flop / times["matmul"][1],
        "copy_gb_per_cpu_s": moved / times["copy"][0],
        "copy_gb_per_s": moved / times["copy"][1],
    }


def matmul_flops(size: int, seconds: float, dtype: Any) -> float:
    """FLOP a second of one device in a square matmul, all of this process's at work at once: the
    best of what was tried in so many seconds, since a busy machine only takes away."""
    xs = [jax.device_put(jnp.ones((size, size), dtype), device) for device in jax.local_devices()]
    matmul = jax.jit(lambda x: x @ x)
    once = lambda: jax.block_until_ready([matmul(x) for x in xs])
    once()
    times, end = [], time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        before = time.perf_counter()
        once()
        times.append(time.perf_counter() - before)
    return 2 * size**3 / min(times)


def peak_rss() -> int:
    """Most bytes that this process has held in memory."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
