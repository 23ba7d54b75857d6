"""How a config cuts its rollouts: rows of a minibatch, of a prompt, response columns, updates."""

import math
from typing import Any

Config = Any


def minibatch_rows(c: Config) -> int:
    """Rows of an optimizer update."""
    return c.learn.minibatch * (c.rollout.subset or c.algo.group_size)


def widths(c: Config) -> tuple[int, ...]:
    """Response columns that the update is compiled for, ascending: halves of the most, whole
    tiles of 128 where they are longer than one."""
    T = c.rollout.max_response
    halves = [-(-T >> k) for k in range(c.learn.widths)]
    return tuple(sorted({min(T, -(-n // 128) * 128) if n > 128 else n for n in halves}))


def shared_rows(c: Config, shards: int) -> int:
    """Adjacent rows of a device's microbatch that have one prompt."""
    rows = min(minibatch_rows(c), c.learn.microbatch) // shards
    return math.gcd(rows, minibatch_rows(c) // c.learn.minibatch)


def updates_a_step(c: Config) -> int:
    """Optimizer updates of a rollout step."""
    return c.rollout.prompts // c.learn.minibatch * c.learn.epochs
